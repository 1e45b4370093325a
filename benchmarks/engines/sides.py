"""Jobs on a cluster: Shoal's, and those of the usual launchers there."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from benchmarks import processes
from benchmarks.commits import Commits
from benchmarks.engines.sites import RaySite, Site, SlurmSite, SshSite
from benchmarks.sides.side import SCRIPTS, Load
from benchmarks.sides.torchrun import Torchrun

GIVE_BACK_S = 60.0
SiteT = TypeVar("SiteT", bound=Site)


class Side(ABC, Generic[SiteT]):
    """One way to train on a site. `home` outlives the jobs and holds caches.

    `survives` says whether the loss of a machine is measured too.
    """

    name: ClassVar[str]
    survives: ClassVar[bool] = True
    settings: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, site: SiteT, home: Path) -> None:
        self.site, self.home = site, home
        home.mkdir(parents=True)

    def start(self, directory: Path, load: Load, least: int, most: int) -> float:
        """Start a job whose members log their commits to a folder; return the time of the command."""
        directory.mkdir(parents=True)
        # Processes on hosts of their own have numbers that mean nothing here.
        self.commits = Commits(directory, running=lambda _: True)
        given = [*load.arguments(directory), "--hosts"]
        argvs = self.commands(given, least, most)
        at = time.monotonic()
        self.started = [processes.start(argv, self.home / "log", self.site.env | self.env()) for argv in argvs]
        return at

    @abstractmethod
    def commands(self, job: list[str], least: int, most: int) -> list[list[str]]:
        """Return the commands that a user would type, one per terminal."""

    def env(self) -> dict[str, str]:
        return {}

    def alive(self) -> bool:
        return all(one.poll() is None for one in self.started)

    def can_lose(self, machine: str) -> bool:
        """Return whether this side is designed to survive the loss of this machine."""
        return bool(machine)

    def end(self) -> None:
        """End the job and free all machines of the site."""
        for one in self.started:
            one.terminate()
        for one in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(GIVE_BACK_S)
            processes.end(one)
        self.site.clear()


class Shoal(Side[Site]):
    """`shoal run --on POOL` with default settings."""

    name = "shoal"

    def __init__(self, site: Site, home: Path) -> None:
        super().__init__(site, home)
        self._project = home / "project"
        (self._project / "benchmarks").mkdir(parents=True)
        for file in ("__init__.py", "job.py"):
            shutil.copy(SCRIPTS.parent / file, self._project / "benchmarks")
        shutil.copy(SCRIPTS / "train_shoal.py", self._project)
        lines = [f"{key} = {json.dumps(value)}" for key, value in site.pool.items()]
        (self._project / "shoal.toml").write_text("\n".join(["[pool.pool]", *lines, ""]))

    def env(self) -> dict[str, str]:
        return {"SHOAL_HOME": str(self.home / "shoal")}

    def commands(self, job: list[str], least: int, most: int) -> list[list[str]]:
        settings = [part for one in self.site.settings for part in ("--set", one)]
        run = [sys.executable, "-m", "shoal.cli.main", "run", "--on", "pool", "-n", f"{least}:{most}", *settings]
        inside = f"cd {shlex.quote(str(self._project))} && exec {shlex.join([*run, 'train_shoal.py', *job])}"
        return [["/bin/sh", "-c", inside]]


class TorchrunSide(Side[SiteT]):
    """torchrun on each machine, with timeouts as short as its documentation allows."""

    settings = Torchrun.settings

    def env(self) -> dict[str, str]:
        # Workers that share the agents' store read stale addresses after a restart: pytorch/pytorch#135712.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def torchrun(self, job: list[str], least: int, most: int, host: str, is_host: str, address: str) -> str:
        rendezvous = ",".join(f"{key}={value}" for key, value in self.settings["rdzv"].items())
        words = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={least}:{most}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=bench"),
            f"--rdzv-endpoint={host}:{self._port}",
            *(f"--local-addr={address}", "--max-restarts=100"),
            f"--monitor-interval={self.settings['monitor_interval_s']}",
            f"--shutdown-timeout={self.settings['shutdown_timeout_s']}",
        ]
        script = [str(SCRIPTS / "train_torchrun.py"), *job]
        return f'exec {shlex.join(words)} "--rdzv-conf={rendezvous},is_host={is_host}" {shlex.join(script)}'

    def start(self, directory: Path, load: Load, least: int, most: int) -> float:
        self._port = processes.free_port()
        return super().start(directory, load, least, most)


class SrunTorchrun(TorchrunSide[SlurmSite]):
    """srun starts a torchrun on each node; the job outlives a node (`--no-kill`), but not the first."""

    name = "srun torchrun"

    def env(self) -> dict[str, str]:
        return super().env() | {"GLOO_SOCKET_IFNAME": "lo"}

    def commands(self, job: list[str], least: int, most: int) -> list[list[str]]:
        srun = ["srun", "--partition=low", f"--nodes={most}", "--ntasks-per-node=1", "--cpus-per-task=2", "--no-kill"]
        inside = self.torchrun(job, least, most, "127.0.0.1", "$((SLURM_NODEID == 0))", "127.0.0.1")
        return [[*srun, "--kill-on-bad-exit=0", "/bin/sh", "-c", inside]]

    def can_lose(self, machine: str) -> bool:
        return machine != self.site.nodes[0]


class SbatchTorchrun(SrunTorchrun):
    """The same as a batch job, which waits for Slurm's scheduler as Shoal's jobs do; an interactive srun does not."""

    name = "sbatch, srun torchrun"
    survives = False

    def commands(self, job: list[str], least: int, most: int) -> list[list[str]]:
        (srun,) = super().commands(job, least, most)
        asked = [word for word in srun[1:] if word.startswith("--") and word != "--kill-on-bad-exit=0"]
        script = self.home / "job.sh"
        script.write_text(f"#!/bin/sh\n{shlex.join(srun)}\n")
        return [["sbatch", "--wait", f"--output={self.home}/job.log", *asked, str(script)]]


class SshTorchrun(TorchrunSide[SshSite]):
    """ssh starts a torchrun on each host."""

    name = "ssh + torchrun"

    def commands(self, job: list[str], least: int, most: int) -> list[list[str]]:
        return [self._ssh(host, job, least, most) for host in self.site.hosts[:most]]

    def _ssh(self, host: str, job: list[str], least: int, most: int) -> list[str]:
        first, address = (self.site.network.address(one) for one in (self.site.hosts[0], host))
        env = {**self.site.env, **self.env(), "GLOO_SOCKET_IFNAME": "eth0"}
        exports = " ".join(f"{key}={shlex.quote(value)}" for key, value in env.items())
        inside = self.torchrun(job, least, most, first, str(int(host == self.site.hosts[0])), address)
        return ["ssh", "-F", str(self.site.network.config), host, f"export {exports}; {inside}"]


class RayTrain(Side[RaySite]):
    """TorchTrainer, which restarts all workers from its last checkpoint when one of them fails."""

    name = "Ray Train"
    settings: ClassVar[Mapping[str, Any]] = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": 0.1,
        "RAY_health_check_period_ms": 1000,
        "collective_timeout_s": 10,
        "checkpoint_every_steps": 10,
    }

    def env(self) -> dict[str, str]:
        return {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(self.settings["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"])}

    def commands(self, job: list[str], least: int, most: int) -> list[list[str]]:
        del least
        script = [sys.executable, str(SCRIPTS / "train_ray.py"), "--workers", str(most)]
        return [[*script, "--storage", str(self.home / f"storage-{time.monotonic_ns()}"), *job]]


PEERS: dict[str, tuple[type[Side[Any]], ...]] = {
    "slurm": (SrunTorchrun, SbatchTorchrun),
    "ray": (RayTrain,),
    "ssh": (SshTorchrun,),
}
