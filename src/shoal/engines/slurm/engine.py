"""Slurm: every hire is a batch job of one task, whose script becomes the agent; found again by its name.

The name of the job is the handle. So a hire is the same one however often Slurm queues it again, whatever number its
job has, and also if Slurm took a submission without saying so: a second job of the same name waits for the first
(``--dependency=singleton``), and both are cancelled together.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.engines import agent_script, exit_message, grace_period, stale_dirs
from shoal.engines.engine import AllocationRequest, AllocationStatus, Capacity, Engine, EngineOptions, RenderedRequest
from shoal.engines.slurm import jobs as slurm_jobs
from shoal.engines.slurm import nodes as slurm_nodes
from shoal.engines.slurm.errors import failure, not_configured, not_installed
from shoal.errors import AllocationRefused, BadCredentials, EngineUnreachable, LaunchError
from shoal.wire import credentials

NOTICE_S = 60
COMMAND_S = 60.0
# Slurm's own default of what passes between SIGTERM and SIGKILL.
KILL_WAIT_S = 30.0
LOG_CHARACTERS = 20_000
LOG = "job.log"
# What would make sbatch wait, make many jobs of one, or request another cluster than squeue asks.
UNWANTED = ("SBATCH_WAIT", "SBATCH_ARRAY_INX", "SBATCH_CLUSTERS")
# What tells our jobs apart, and how they are talked to; nobody else may set it.
SHORT = ("-J", "-a", "-d", "-o", "-M", "-W", "-N", "-n")
LONG = ("job-name", "array", "dependency", "output", "clusters", "wait", "nodes", "ntasks", "parsable", "wrap")


class SlurmOptions(EngineOptions, frozen=True, kw_only=True):
    """What a pool of Slurm's can be told. All are handed to sbatch under the same name if no other is said.

    `directory` must be seen by the nodes too; as always, it is ~/.shoal if nothing else is said.
    """

    partition: Annotated[str, Meta(description="one partition, or several with commas")] = ""
    account: Annotated[str, Meta(description="whom the time is charged to")] = ""
    qos: Annotated[str, Meta(description="quality of service")] = ""
    constraint: Annotated[str, Meta(description="features that a node must have")] = ""
    gres: Annotated[str, Meta(description="generic resources of each hire, as gpu:a100:1")] = ""
    gpus: Annotated[int | str, Meta(description="GPUs of each hire, a number or type:number")] = 0
    cpus_per_task: Annotated[int, Meta(ge=0, description="CPUs of each hire; 0 is as the site has it")] = 0
    memory: Annotated[str, Meta(description="memory of each hire (sbatch --mem), as 16G")] = ""
    time_limit: Annotated[int | str, Meta(description="minutes, or as 1-12:00:00 (sbatch --time)")] = ""
    nodelist: Annotated[str, Meta(description="the only nodes to use")] = ""
    exclude: Annotated[str, Meta(description="nodes not to use")] = ""
    requeue: Annotated[bool, Meta(description="let Slurm queue a hire again when its node is lost or preempted")] = True
    notice_s: Annotated[int, Meta(ge=1, le=65535, description="seconds before the time limit to give notice")] = (
        NOTICE_S
    )
    look_s: Annotated[float, Meta(ge=0, description="seconds for which an answer of squeue is good enough")] = 5.0
    extra: Annotated[tuple[str, ...], Meta(description="more options of sbatch, each as --name=value")] = ()

    def __post_init__(self) -> None:
        for option in self.extra:
            name = option.partition("=")[0]
            if not option.startswith("-") or name[:2] in SHORT or name.removeprefix("--") in LONG:
                raise ValueError(f"extra cannot have {option!r}: it is no option of sbatch, or Shoal's own to set")


class Slurm(Engine):
    """Agents as jobs of the Slurm whose commands are on this machine."""

    shared_by_default = True
    sized = True
    takes_images = True
    options_type = SlurmOptions
    options: SlurmOptions

    def __init__(self, pool: str, options: EngineOptions) -> None:
        super().__init__(pool, options)
        given = options.directory or os.environ.get("SHOAL_HOME") or "~/.shoal"
        self._above = Path(given).expanduser().absolute()
        self._looked: tuple[float, str, list[AllocationStatus]] | None = None
        self._kill_wait_s, self._learnt = KILL_WAIT_S, False

    @property
    def size(self) -> tuple[int, int]:
        return self.options.cpus_per_task, slurm_nodes.mib(self.options.memory) << 20

    def render(self, request: AllocationRequest) -> RenderedRequest:
        notice = ("--notice-source", f"slurm:{self.options.notice_s}")
        told = grace_period.within(replace(request, options=(*notice, *request.options)), self._kill_wait_s)
        options = msgspec.structs.replace(self.options, directory=str(self._above))
        # A login shell knows `module`, which is what set-up lines are mostly about.
        shell = "#!/bin/bash -l" if options.setup else "#!/bin/sh"
        python = options.python or ("python3" if options.image else sys.executable)
        script = agent_script.script(told, options, python=python, before=_BEFORE)
        return RenderedRequest(
            arguments(request, self.options, self._home(request.tag, request.allocation)), f"{shell}\n{script}"
        )

    def submit(self, request: AllocationRequest) -> str:
        name = slurm_jobs.job_name(request.tag, request.allocation)
        known = slurm_jobs.seen(self._jobs(f"--name={name}"), request.tag, time.time())
        if any(one.state != "gone" for one in known):
            return name
        where = self._home(request.tag, request.allocation)
        self._learn()
        rendered = self.render(request)
        self._looked = None
        try:
            _prepare(where, request)
            self._run(rendered.argv, rendered.text, rendered.env)
        except AllocationRefused:
            _tidy(where)
            raise
        return name

    def watch(self, tag: str) -> list[AllocationStatus]:
        now = time.monotonic()
        if self._looked is None or self._looked[1] != tag or now - self._looked[0] >= self.options.look_s:
            jobs = self._jobs()
            self._hurry(jobs, tag)
            found = slurm_jobs.seen(jobs, tag, time.time())
            self._looked = (now, tag, [self._with_last_words(one, tag) for one in found])
        return list(self._looked[2])

    def cancel(self, handle: str) -> None:
        self._looked = None
        self._run(("scancel", f"--user={os.getuid()}", f"--name={handle}"))
        for tag, hire in _splits(handle):
            (self._home(tag, hire) / "token").unlink(missing_ok=True)

    def clean_up(self, tag: str, known: Collection[str]) -> None:
        there = {job.name for job in self._jobs()}
        hires = self._above / agent_script.ALLOCATIONS
        for of, hire, where in stale_dirs.homes(hires):
            counted = (of == tag and hire in known) or f"shoal-{of}-{hire}" in there
            if not counted and (where / LOG).exists() and stale_dirs.is_old(where, time.time()):
                (where / "token").unlink(missing_ok=True)
        stale_dirs.remove(hires, tag, known, time.time())

    def capacity(self) -> list[Capacity]:
        only = (f"--partition={self.options.partition}",) if self.options.partition else ()
        said = self._run(("sinfo", "--noheader", "--Node", f"--Format={slurm_nodes.FORMAT}", *only))
        nodes = slurm_nodes.parse(said)
        if not nodes:
            return [Capacity(self.options.partition or "Slurm", 0, why="Slurm shows no node there")]
        return slurm_nodes.offers(
            nodes,
            cpus=self.options.cpus_per_task,
            memory_mib=slurm_nodes.mib(self.options.memory),
            gpus=slurm_nodes.wanted_gpus(self.options.gpus, self.options.gres),
        )

    def _home(self, tag: str, hire: str) -> Path:
        return self._above / agent_script.ALLOCATIONS / tag / hire

    def _jobs(self, *which: str) -> list[slurm_jobs.SlurmJobRow]:
        """Ours in all states; those that ended stay for as long as the site's MinJobAge, five minutes mostly."""
        argv = ("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", *which)
        said = self._run((*argv, f"--Format={slurm_jobs.FORMAT}"), env={"SLURM_TIME_FORMAT": "%s"})
        return slurm_jobs.parse(said)

    def _learn(self) -> None:
        """Ask once how long jobs of this site may take to end; until it is known, what is usual holds."""
        if not self._learnt:
            with contextlib.suppress(LaunchError):
                said = slurm_jobs.kill_wait_s(self._run(("scontrol", "show", "config")))
                self._kill_wait_s, self._learnt = KILL_WAIT_S if said is None else said, True

    def _hurry(self, jobs: Sequence[slurm_jobs.SlurmJobRow], tag: str) -> None:
        """Ask Slurm not to let two minutes pass before it starts what it has queued again."""
        now, prefix = time.time(), slurm_jobs.job_name(tag, "")
        for job in jobs:
            if job.name.startswith(prefix) and slurm_jobs.is_delayed(job, now):
                # If it cannot be asked, or the site does not allow it, the job starts those two minutes later.
                with contextlib.suppress(LaunchError):
                    self._run(("scontrol", "update", f"JobId={job.number}", f"StartTime=now+{slurm_jobs.ENOUGH_S}"))

    def _with_last_words(self, one: AllocationStatus, tag: str) -> AllocationStatus:
        python = self.options.python or sys.executable
        words = (
            boot_words(self._home(tag, one.allocation), python) if one.state == "gone" and "FAILED" in one.why else ""
        )
        return replace(one, why=f"{one.why}: {words}") if words else one

    def _run(self, argv: Sequence[str], text: str = "", env: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm's prints, or why it did not do it."""
        if shutil.which(argv[0]) is None:
            raise not_installed(argv[0])
        conf = os.environ.get("SLURM_CONF")
        if conf and not os.path.exists(conf):
            # Slurm's commands would wait a minute for it.
            raise not_configured(f"SLURM_CONF names {conf}, which is not there")
        try:
            done = subprocess.run(
                argv,
                input=text,
                env={**_environment(), **(env or {})},
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineUnreachable("Slurm does not answer", where=argv[0], why=f"not in {COMMAND_S:g} s") from error
        if done.returncode != 0 and not _is_over(argv, done.stderr):
            given = msgspec.structs.asdict(self.options)
            raise failure(argv, done.stderr, given, self.pool)
        return done.stdout


_NOT_SHARED = "shoal: $home/token is not on $(hostname): set directory to a shared one"
_BEFORE = (
    # Slurm's warning, until the agent listens to it; it would end the script.
    "trap '' USR1",
    f'[ -r "$home/token" ] || {{ echo "{_NOT_SHARED}" >&2; exit 78; }}',
)


def arguments(request: AllocationRequest, options: SlurmOptions, home: Path) -> tuple[str, ...]:
    """What sbatch is told; pure."""
    given = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "gres": options.gres,
        "gpus": options.gpus,
        "cpus-per-task": options.cpus_per_task or request.cpus,
        "mem": options.memory or (f"{-(-request.memory_bytes >> 20)}M" if request.memory_bytes else ""),
        "time": options.time_limit,
        "nodelist": options.nodelist,
        "exclude": options.exclude,
    }
    return (
        "sbatch",
        "--parsable",
        f"--job-name={slurm_jobs.job_name(request.tag, request.allocation)}",
        f"--comment=Shoal's agent {request.allocation}",
        "--dependency=singleton",
        "--nodes=1",
        "--ntasks=1",
        f"--chdir={home}",
        f"--output={str(home).replace('%', '%%')}/{LOG}",
        "--open-mode=append",
        "--export=ALL",
        f"--signal=B:USR1@{options.notice_s}",
        "--requeue" if options.requeue else "--no-requeue",
        *(f"--{name}={value}" for name, value in given.items() if value),
        *_container(options, home),
        *options.extra,
    )


def _container(options: SlurmOptions, home: Path) -> tuple[str, ...]:
    """The job in a container, by NVIDIA's plug-in pyxis; what the agent finds its token in has to be seen there."""
    if not options.image:
        return ()
    above = home.parents[2]
    return (f"--container-image={options.image}", f"--container-mounts={above}:{above}")


def _prepare(where: Path, request: AllocationRequest) -> None:
    """Put what the job will need where it will look for it."""
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Slurm adds to it; by it a hire is known as one of ours.
        (where / LOG).touch(mode=0o600)
        credentials.write(where / "token", request.credentials)
    except (OSError, BadCredentials) as error:
        why = error.why if isinstance(error, BadCredentials) else error.strerror or str(error)
        do = "set directory to one that this machine and the nodes share, with room in it"
        raise AllocationRefused(
            "the token cannot be put where the nodes find it", where=str(where), why=why, do=do
        ) from error


def _tidy(where: Path) -> None:
    with contextlib.suppress(OSError):
        for name in ("token", LOG):
            (where / name).unlink(missing_ok=True)
        where.rmdir()


def boot_words(home: Path, python: str = "") -> str:
    """The last words that a hire left in the shared directory, of its agent or of Slurm."""
    for name in ("agent.log", LOG):
        try:
            text = (home / name).read_text(errors="replace")[-LOG_CHARACTERS:]
        except OSError:
            continue
        if text.strip():
            return exit_message.of_log(text, python)
    return f"it left no word in {home}; do the nodes share that directory?"


def _splits(handle: str) -> list[tuple[str, str]]:
    """Every tag and hire that a job of this name may have been for."""
    parts = handle.split("-")[1:]
    return [("-".join(parts[:at]), "-".join(parts[at:])) for at in range(1, len(parts))]


def _is_over(argv: Sequence[str], said: str) -> bool:
    """Whether what was to be cancelled has ended meanwhile."""
    return argv[0] == "scancel" and ("already completing or completed" in said or "Invalid job id" in said)


def _environment() -> dict[str, str]:
    """Ours, without what another job, or the user's own way to look at the queue, would do to Slurm's commands."""
    kept = ("SLURM_CONF", "SHOAL_HOME")
    left_out = ("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_", "SHOAL_")
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or (not name.startswith(left_out) and name not in UNWANTED)
    }
