"""Engine for Slurm: every allocation is a batch job of one task, whose script becomes the agent.

Identity. The job's name, `shoal-TAG-ALLOCATION`, is the handle. Its number is not: we never learn the number of a job
whose submission was accepted but not confirmed. By name, an allocation stays the same however many jobs it has had, and
`squeue --name` finds it again after the coordinator was restarted.

Once. `submit` looks for a job of this name first. That leaves a gap: Slurm may have accepted an earlier submission
without saying so, and squeue may not show it yet. So every job is submitted with `--dependency=singleton`: a second
job of the same name and user waits until the first has ended. `watch` counts both as one allocation, and `scancel
--name` cancels both.

One job per allocation, no job arrays. The tasks of an array share name, limits and fate in `scancel`, which is the
opposite of what is needed here: allocations are requested, released and preempted one by one. `SBATCH_ARRAY_INX` in the
user's environment would make an array of our job, so it is removed.

Requeue. With `--requeue`, Slurm queues the job again when its node fails or is preempted. The allocation then goes from
running back to waiting, and its next agent has the same name; the coordinator treats it as a machine that left and
came back. While a job that will be requeued is still being ended, squeue shows it as COMPLETING with an end far in the
future: that counts as waiting, not as gone. Slurm delays requeued jobs by two minutes; `watch` asks it to start them
after ten seconds instead, which is enough for its messages to the old node to arrive.

Notice. `--signal=B:USR1@SECONDS` makes Slurm signal the batch script, which is the agent by then, before the time
limit and at preemption; `agent.notices.slurm` turns that into a notice. Until the agent is up, the script ignores it.

Ending. `scancel` sends SIGTERM, and SIGKILL after the site's `KillWait`. The agent's grace period is shortened to fit
into that (`grace_period.within`).

Files. Slurm copies the script but not the token, so `directory` has to be on a disk that the nodes share. A job that
does not find its token ends with a message that says so.
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
# Slurm's own default for the time between SIGTERM and SIGKILL.
KILL_WAIT_S = 30.0
LOG_CHARACTERS = 20_000
LOG = "job.log"
# These would make sbatch wait, make an array of the job, or use another cluster than squeue does.
UNWANTED_VARIABLES = ("SBATCH_WAIT", "SBATCH_ARRAY_INX", "SBATCH_CLUSTERS")
# Options that identify our jobs or decide how sbatch answers; users may not set them.
RESERVED_SHORT = ("-J", "-a", "-d", "-o", "-M", "-W", "-N", "-n")
RESERVED_LONG = ("job-name", "array", "dependency", "output", "clusters", "wait", "nodes", "ntasks", "parsable", "wrap")


class SlurmOptions(EngineOptions, frozen=True, kw_only=True):
    """Options of a Slurm pool; each is passed to sbatch under the same name, unless its description says otherwise.

    `directory` must be on a disk that the nodes share; the default is ~/.shoal, as for every engine.
    """

    partition: Annotated[str, Meta(description="one partition, or several with commas")] = ""
    account: Annotated[str, Meta(description="account that the time is charged to")] = ""
    qos: Annotated[str, Meta(description="quality of service")] = ""
    constraint: Annotated[str, Meta(description="features that a node must have")] = ""
    gres: Annotated[str, Meta(description="generic resources of each allocation, as gpu:a100:1")] = ""
    gpus: Annotated[int | str, Meta(description="GPUs of each allocation, a number or type:number")] = 0
    cpus_per_task: Annotated[int, Meta(ge=0, description="CPUs of each allocation; 0 for the site's default")] = 0
    memory: Annotated[str, Meta(description="memory of each allocation (sbatch --mem), as 16G")] = ""
    time_limit: Annotated[int | str, Meta(description="minutes, or as 1-12:00:00 (sbatch --time)")] = ""
    nodelist: Annotated[str, Meta(description="the only nodes to use")] = ""
    exclude: Annotated[str, Meta(description="nodes not to use")] = ""
    requeue: Annotated[
        bool, Meta(description="let Slurm queue an allocation again when its node fails or is preempted")
    ] = True
    notice_s: Annotated[int, Meta(ge=1, le=65535, description="seconds before the time limit to give notice")] = (
        NOTICE_S
    )
    look_s: Annotated[float, Meta(ge=0, description="seconds for which a reply of squeue is reused")] = 5.0
    extra: Annotated[tuple[str, ...], Meta(description="further options of sbatch, each as --name=value")] = ()

    def __post_init__(self) -> None:
        for option in self.extra:
            name = option.partition("=")[0]
            if not option.startswith("-") or name[:2] in RESERVED_SHORT or name.removeprefix("--") in RESERVED_LONG:
                raise ValueError(f"invalid {option!r} in extra: not an option of sbatch, or one that Shoal sets itself")


class Slurm(Engine):
    """Agents as jobs of the Slurm cluster that the commands on this machine talk to."""

    shared_by_default = True
    sized = True
    takes_images = True
    options_type = SlurmOptions
    options: SlurmOptions

    def __init__(self, pool: str, options: EngineOptions) -> None:
        super().__init__(pool, options)
        directory = options.directory or os.environ.get("SHOAL_HOME") or "~/.shoal"
        self._directory = Path(directory).expanduser().absolute()
        self._last_list: tuple[float, str, list[AllocationStatus]] | None = None
        self._kill_wait_s, self._kill_wait_known = KILL_WAIT_S, False

    @property
    def size(self) -> tuple[int, int]:
        return self.options.cpus_per_task, slurm_nodes.mib(self.options.memory) << 20

    def render(self, request: AllocationRequest) -> RenderedRequest:
        notice = ("--notice-source", f"slurm:{self.options.notice_s}")
        timed = grace_period.within(replace(request, options=(*notice, *request.options)), self._kill_wait_s)
        options = msgspec.structs.replace(self.options, directory=str(self._directory))
        # Most setup lines use `module`, which only a login shell defines.
        shell = "#!/bin/bash -l" if options.setup else "#!/bin/sh"
        python = options.python or ("python3" if options.image else sys.executable)
        script = agent_script.script(timed, options, python=python, before=_BEFORE)
        return RenderedRequest(
            arguments(request, self.options, self._home(request.tag, request.allocation)), f"{shell}\n{script}"
        )

    def submit(self, request: AllocationRequest) -> str:
        name = slurm_jobs.job_name(request.tag, request.allocation)
        existing = slurm_jobs.statuses(self._jobs(f"--name={name}"), request.tag, time.time())
        if any(status.state != "gone" for status in existing):
            return name
        home = self._home(request.tag, request.allocation)
        self._ask_kill_wait()
        rendered = self.render(request)
        self._last_list = None
        try:
            _prepare(home, request)
            self._run(rendered.argv, rendered.text, rendered.env)
        except AllocationRefused:
            _remove_files(home)
            raise
        return name

    def watch(self, tag: str) -> list[AllocationStatus]:
        now = time.monotonic()
        if self._last_list is None or self._last_list[1] != tag or now - self._last_list[0] >= self.options.look_s:
            jobs = self._jobs()
            self._shorten_delays(jobs, tag)
            statuses = slurm_jobs.statuses(jobs, tag, time.time())
            self._last_list = (now, tag, [self._with_exit_message(status, tag) for status in statuses])
        return list(self._last_list[2])

    def cancel(self, handle: str) -> None:
        self._last_list = None
        self._run(("scancel", f"--user={os.getuid()}", f"--name={handle}"))
        for tag, allocation in _splits(handle):
            (self._home(tag, allocation) / "token").unlink(missing_ok=True)

    def clean_up(self, tag: str, active: Collection[str]) -> None:
        queued = {job.name for job in self._jobs()}
        root = self._directory / agent_script.ALLOCATIONS
        for owner, allocation, home in stale_dirs.homes(root):
            needed = (owner == tag and allocation in active) or f"shoal-{owner}-{allocation}" in queued
            if not needed and (home / LOG).exists() and stale_dirs.is_old(home, time.time()):
                (home / "token").unlink(missing_ok=True)
        stale_dirs.remove(root, tag, active, time.time())

    def capacity(self) -> list[Capacity]:
        only = (f"--partition={self.options.partition}",) if self.options.partition else ()
        output = self._run(("sinfo", "--noheader", "--Node", f"--Format={slurm_nodes.FORMAT}", *only))
        nodes = slurm_nodes.parse(output)
        if not nodes:
            return [Capacity(self.options.partition or "Slurm", 0, why="Slurm lists no node there")]
        return slurm_nodes.capacity(
            nodes,
            cpus=self.options.cpus_per_task,
            memory_mib=slurm_nodes.mib(self.options.memory),
            gpus=slurm_nodes.requested_gpus(self.options.gpus, self.options.gres),
        )

    def _home(self, tag: str, allocation: str) -> Path:
        return self._directory / agent_script.ALLOCATIONS / tag / allocation

    def _jobs(self, *filters: str) -> list[slurm_jobs.SlurmJobRow]:
        """Return the user's jobs in all states; ended ones stay for the site's MinJobAge, usually five minutes."""
        argv = ("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", *filters)
        output = self._run((*argv, f"--Format={slurm_jobs.FORMAT}"), env={"SLURM_TIME_FORMAT": "%s"})
        return slurm_jobs.parse(output)

    def _ask_kill_wait(self) -> None:
        """Ask Slurm once for the site's KillWait; until it is known, Slurm's default applies."""
        if not self._kill_wait_known:
            with contextlib.suppress(LaunchError):
                kill_wait_s = slurm_jobs.kill_wait_s(self._run(("scontrol", "show", "config")))
                self._kill_wait_s, self._kill_wait_known = KILL_WAIT_S if kill_wait_s is None else kill_wait_s, True

    def _shorten_delays(self, jobs: Sequence[slurm_jobs.SlurmJobRow], tag: str) -> None:
        """Ask Slurm to start requeued jobs sooner than after its two minutes."""
        now, prefix = time.time(), slurm_jobs.job_name(tag, "")
        for job in jobs:
            if job.name.startswith(prefix) and slurm_jobs.is_delayed(job, now):
                # Best effort: a site may forbid it, and then the job starts two minutes later.
                with contextlib.suppress(LaunchError):
                    self._run(
                        ("scontrol", "update", f"JobId={job.number}", f"StartTime=now+{slurm_jobs.REQUEUE_DELAY_S}")
                    )

    def _with_exit_message(self, status: AllocationStatus, tag: str) -> AllocationStatus:
        """Return the status, with the agent's own message added if its job failed."""
        if status.state != "gone" or "FAILED" not in status.why:
            return status
        message = log_message(self._home(tag, status.allocation), self.options.python or sys.executable)
        return replace(status, why=f"{status.why}: {message}")

    def _run(self, argv: Sequence[str], text: str = "", env: Mapping[str, str] | None = None) -> str:
        """Run a command of Slurm and return its output; raise the `LaunchError` that its failure means."""
        if shutil.which(argv[0]) is None:
            raise not_installed(argv[0])
        conf = os.environ.get("SLURM_CONF")
        if conf and not os.path.exists(conf):
            # Slurm's commands would wait a minute for the file.
            raise not_configured(f"SLURM_CONF names {conf}, which does not exist")
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
            raise EngineUnreachable(
                "Slurm does not answer", where=argv[0], why=f"no reply within {COMMAND_S:g} s"
            ) from error
        if done.returncode != 0 and not _has_ended(argv, done.stderr):
            raise failure(argv, done.stderr, msgspec.structs.asdict(self.options), self.pool)
        return done.stdout


_NOT_SHARED = "shoal: $home/token does not exist on $(hostname): set directory to one on a shared disk"
_BEFORE = (
    # Slurm's notice would end the script; the agent handles it once it is up.
    "trap '' USR1",
    f'[ -r "$home/token" ] || {{ echo "{_NOT_SHARED}" >&2; exit 78; }}',
)


def arguments(request: AllocationRequest, options: SlurmOptions, home: Path) -> tuple[str, ...]:
    """Return the sbatch command; pure."""
    values = {
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
        *(f"--{name}={value}" for name, value in values.items() if value),
        *_container(options, home),
        *options.extra,
    )


def _container(options: SlurmOptions, home: Path) -> tuple[str, ...]:
    """Return the options of NVIDIA's plug-in pyxis that run the job in a container, with the token's directory."""
    if not options.image:
        return ()
    directory = home.parents[2]
    return (f"--container-image={options.image}", f"--container-mounts={directory}:{directory}")


def _prepare(home: Path, request: AllocationRequest) -> None:
    """Write the token to the directory that the job will read it from."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Slurm appends to it; its presence also marks the allocation as one of this engine.
        (home / LOG).touch(mode=0o600)
        credentials.write(home / "token", request.credentials)
    except (OSError, BadCredentials) as error:
        why = error.why if isinstance(error, BadCredentials) else error.strerror or str(error)
        do = "set directory to one that this machine and the nodes share, with free space"
        raise AllocationRefused("cannot write the token for the nodes", where=str(home), why=why, do=do) from error


def _remove_files(home: Path) -> None:
    with contextlib.suppress(OSError):
        for name in ("token", LOG):
            (home / name).unlink(missing_ok=True)
        home.rmdir()


def log_message(home: Path, python: str = "") -> str:
    """Return the exit message in the allocation's logs, of its agent or of the batch script."""
    for name in ("agent.log", LOG):
        try:
            text = (home / name).read_text(errors="replace")[-LOG_CHARACTERS:]
        except OSError:
            continue
        if text.strip():
            return exit_message.of_log(text, python)
    return f"no log in {home}; do the nodes share that directory?"


def _splits(handle: str) -> list[tuple[str, str]]:
    """Return every pair of tag and allocation that a job name may stand for: both may contain dashes."""
    parts = handle.split("-")[1:]
    return [("-".join(parts[:at]), "-".join(parts[at:])) for at in range(1, len(parts))]


def _has_ended(argv: Sequence[str], errors: str) -> bool:
    """Return whether a failed scancel only means that the job had ended already."""
    return argv[0] == "scancel" and ("already completing or completed" in errors or "Invalid job id" in errors)


def _environment() -> dict[str, str]:
    """Return our environment without variables that would change what Slurm's commands do or print."""
    kept = ("SLURM_CONF", "SHOAL_HOME")
    dropped = ("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_", "SHOAL_")
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or (not name.startswith(dropped) and name not in UNWANTED_VARIABLES)
    }
