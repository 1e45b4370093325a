"""Slurm, Ray and ssh hosts that reach each other: all are connected to one hub, and to nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.engines import ray_cluster, slurm_cluster, ssh_hosts
from tests.engines.ray_cluster import RayCluster
from tests.engines.slurm_cluster import Cluster
from tests.engines.ssh_hosts import SshNetwork, ssh_network
from tests.engines.ssh_site import SOURCES
from tests.netns.network import SUBNET


def why_not() -> str:
    """Return what is missing to start all of them; "" if nothing."""
    return slurm_cluster.missing() or ssh_hosts.why_not() or ray_cluster.why_not()


@dataclass(frozen=True)
class AllEngines:
    """Three clusters, and their pools for the shoal.toml of a project."""

    slurm: Cluster
    ray: RayCluster
    hosts: SshNetwork

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment variables that the clients of all clusters need."""
        return {"SLURM_CONF": str(self.slurm.conf), "PATH": slurm_cluster.PATH, "RAY_TMPDIR": self.ray.directory}

    def pools(self, path: Path, exports: dict[str, str]) -> str:
        """Return pools of two machines each, with short waits; records are written to this disk."""
        told = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", **exports}
        setup = "export " + " ".join(f"{name}='{value}'" for name, value in told.items())
        config = f'config = "{self.hosts.config}"\n'
        both = f'limit = 2\nwait_s = 2\npython = "{sys.executable}"\nsetup = ["""{setup}"""]\n'
        return (
            f'[pool.slurm]\nengine = "slurm"\nlook_s = 0.2\nrequeue = false\ndirectory = "{path}/slurm"\n{both}'
            f'[pool.rays]\nengine = "ray"\naddress = "{self.ray.address}"\nresources = {{seat = 1}}\ngrace_s = 5\n'
            f'directory = "{path}/rays"\n{both}'
            # No machine has this address.
            f'[pool.dead]\nengine = "ssh"\nhosts = ["{SUBNET}.200"]\n{config}connect_timeout_s = 2\n'
            f'[pool.lab]\nengine = "ssh"\nhosts = ["h1", "h2"]\n{config}connect_timeout_s = 3\n{both}'
        )

    def left_in(self, path: Path) -> list[str]:
        """Return what is left of runs below a directory, after cancelled jobs had time to complete."""
        deadline = time.monotonic() + 180
        while (left := self._left_in(path)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left_in(self, path: Path) -> list[str]:
        """Return jobs, processes and tokens; lost nodes of Ray do not count."""
        jobs = self.slurm.ask("squeue", "--noheader", "--format=%j").stdout.split()
        found = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
        agents = [argv for argv in found if " shoal.agent " in argv and str(path) in argv]
        agents += [str(one) for host in ("h1", "h2") for one in self.hosts.running(host, "shoal.agent")]
        homes = [path / "slurm", self.hosts.home("h1"), self.hosts.home("h2")]
        return [*jobs, *agents, *(str(file) for home in homes for file in home.rglob("token*"))]

    @contextlib.contextmanager
    def slow(self, host: str, rate: str) -> Iterator[None]:
        """Limit the bandwidth of a host while the context is active."""
        how = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s")
        self.hosts.tc("", "add", "dev", host, *how)
        self.hosts.tc(host, "add", "dev", "eth0", *how)
        try:
            yield
        finally:
            self.hosts.tc("", "del", "dev", host, "root")
            self.hosts.tc(host, "del", "dev", "eth0", "root")


@contextlib.contextmanager
def all_engines(path: Path, rays: int) -> Iterator[AllEngines]:
    """Start all clusters, reachable from this thread; leave nothing of them behind."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(ssh_network(path / "net", "h1", "h2"))
        # Not below pytest's own directory: the path of munge's socket has to be short.
        slurm = Cluster(Path(tempfile.mkdtemp(prefix="shoal-slurm-")), kill_wait_s=65)
        stack.callback(slurm.stop)
        slurm.start()
        ray = RayCluster(apart=False)
        stack.callback(ray.close)
        for _ in range(rays):
            ray.add(num_cpus=1, resources={"seat": 1})
        before = dict(os.environ)
        found = AllEngines(slurm, ray, hosts)
        os.environ.update(found.environ)
        stack.callback(os.environ.update, before)
        yield found
