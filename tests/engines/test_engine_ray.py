"""Agents on a real Ray cluster of three raylets, as the engine starts them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal.engines.ray import Ray, RayOptions
from shoal.errors import EngineUnreachable, HireRefused
from shoal.testing import engines as suite
from shoal.testing.engines import SCENARIOS, Site
from tests.engines.ray_cluster import RayCluster, why_not

pytest.importorskip("ray", reason="SKIPPED, no Ray here: scripts/setup ray, or pip install 'shoal[ray]'")
pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(180), pytest.mark.xdist_group("ray")]

WORKERS = 2
WORKER = {"num_cpus": 4, "resources": {"seat": 1}, "labels": {"lab": "here"}}
NODE_LOSS_SEEN_S = 10.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    if why := why_not():
        pytest.skip(why)
    made = RayCluster()
    try:
        with made.network():
            os.environ["RAY_TMPDIR"] = made.directory
            yield made
    finally:
        os.environ.pop("RAY_TMPDIR", None)
        made.close()


class RaySite(Site):
    """Each hire has the only seat of its node, so that the loss of a node is that of one hire."""

    def __init__(self, path: Path, cluster: RayCluster, address: str = "", **given: object) -> None:
        super().__init__(path)
        self.cluster = cluster
        self._address = address or cluster.address
        self._given = given
        self._engines: list[Ray] = []
        while len(cluster.raylets()) < WORKERS:
            cluster.add(**WORKER)

    def __exit__(self, *given: object) -> None:
        try:
            super().__exit__(*given)
        finally:
            for engine in self._engines:
                engine.close()

    def engine(self, **more: object) -> Ray:
        given = {"python": sys.executable, "directory": str(self.path / "home"), **self._given, **more}
        made = Ray("rays", RayOptions(address=self._address, grace_s=5.0, **given))
        self._engines.append(made)
        return made

    def kill(self, hire: str) -> None:
        """The first with its node, the others alone."""
        agent = self.agent(hire)
        (raylet if hire == "pool-1" else psutil.Process)(agent.pid).kill()

    def agent(self, hire: str) -> psutil.Process:
        commands = suite._command_lines()
        (pid,) = (pid for pid in suite._agents_of(self.tag) if f"--name {hire} " in commands[pid])
        return psutil.Process(pid)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        with self.cluster.headless():
            yield


def raylet(pid: int) -> psutil.Process:
    """The raylet of the node on which this process is."""
    return next(one for one in psutil.Process(pid).parents() if one.name() == "raylet")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_ray_does_what_engines_do(scenario: Callable[[Site], None], tmp_path: Path, cluster: RayCluster) -> None:
    seated = {"resources": {"seat": 1.0}} if scenario is suite.sees_what_was_killed_from_outside else {}
    with RaySite(tmp_path, cluster, **seated) as site:
        scenario(site)
