"""Ray engine on a real cluster of three raylets."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engines.ray_cluster import RayCluster, why_not
from tests.engines.test_pool_runs import pool_run

from shoal.engines.engine import AllocationRequest, AllocationStatus
from shoal.engines.ray.engine import DRIVER, Ray, RayOptions
from shoal.errors import AllocationRefused, EngineUnreachable
from shoal.testing import engine_conformance as suite
from shoal.testing.engine_conformance import SCENARIOS, EngineSite
from shoal.testing.wait import until
from shoal.wire.credentials import Credentials

pytest.importorskip("ray", reason="SKIPPED, no Ray here: scripts/setup ray, or pip install 'shoal-train[ray]'")
pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600), pytest.mark.xdist_group("ray")]

WORKERS = 2
WORKER = {"num_cpus": 4, "resources": {"seat": 1}, "labels": {"lab": "here"}}
GONE_WITHIN_S = 120.0


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


class RaySite(EngineSite):
    """Site where each allocation fills a node, so that the loss of a node is that of one allocation."""

    def __init__(self, path: Path, cluster: RayCluster, **given: Any) -> None:
        super().__init__(path)
        self.cluster = cluster
        self._given = given
        self._leaving = False
        self._engines: list[Ray] = []
        while len(cluster.raylets()) < WORKERS:
            cluster.add(**WORKER)

    def __exit__(self, *given: object) -> None:
        self._leaving = True
        try:
            super().__exit__(*given)
        finally:
            for engine in self._engines:
                engine.close()

    def engine(self) -> Ray:
        if not self._leaving:
            given = {"python": sys.executable, "directory": str(self.path / "home"), **self._given}
            self._engines.append(Ray("rays", RayOptions(address=self.cluster.address, grace_s=5.0, **given)))
        return self._engines[-1]

    def kill(self, allocation: str) -> None:
        """Kill the first with its node, the others alone."""
        agent = self.agent(allocation)
        (raylet if allocation == "pool-1" else psutil.Process)(agent.pid).kill()

    def agent(self, allocation: str) -> psutil.Process:
        (pid,) = suite.agent_pids(self.tag, allocation)
        return psutil.Process(pid)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        with self.cluster.headless():
            yield


def raylet(pid: int) -> psutil.Process:
    """Return the raylet of the node that runs this process."""
    return next(one for one in psutil.Process(pid).parents() if one.name() == "raylet")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_ray_engine_conforms(scenario: Callable[[EngineSite], None], tmp_path: Path, cluster: RayCluster) -> None:
    seated = {"resources": {"seat": 1.0}} if scenario is suite.notices_agents_killed_from_outside else {}
    with RaySite(tmp_path, cluster, **seated) as site:
        scenario(site)


class Lone:
    """Allocations without a coordinator: their agents look for it until they are cancelled."""

    def __init__(self, path: Path, cluster: RayCluster) -> None:
        self.path, self.cluster = path, cluster
        self.tag = f"t{secrets.token_hex(3)}"
        self.opened: list[Ray] = []
        while len(cluster.raylets()) < WORKERS:
            cluster.add(**WORKER)

    def engine(self, **more: Any) -> Ray:
        given = {"address": self.cluster.address, "python": sys.executable, "directory": str(self.path), **more}
        self.opened.append(Ray("rays", RayOptions(grace_s=5.0, **given)))
        return self.opened[-1]

    def ask(self, allocation: str) -> AllocationRequest:
        return AllocationRequest(
            allocation, self.tag, "http://127.0.0.1:9", Credentials("not-shown"), 1, ("--preload", "msgspec")
        )

    def until(self, engine: Ray, allocation: str, state: str, within_s: float = 60.0) -> AllocationStatus:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for one in engine.watch(self.tag):
                if one.allocation == allocation and one.state == state:
                    return one
            time.sleep(0.1)
        raise AssertionError(f"{allocation} is not {state}: {engine.watch(self.tag)}")

    def reached(self, engine: Ray) -> None:
        """Retry as a coordinator would: what Ray starts on the head for a client may fail to start."""
        for _ in range(3):
            with contextlib.suppress(EngineUnreachable):
                engine.watch(self.tag)
                return

    def agent(self, allocation: str) -> psutil.Process:
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            for pid in suite.agent_pids(self.tag, allocation):
                with contextlib.suppress(psutil.NoSuchProcess):
                    return psutil.Process(pid)
            time.sleep(0.05)
        raise AssertionError(f"{allocation} has no agent")

    def close(self) -> None:
        usable = [one for one in self.opened if one.options.address == self.cluster.address and not one.options.client]
        engine = usable[0] if usable else self.engine()
        for seen in engine.watch(self.tag):
            engine.cancel(seen.handle)
        for one in self.opened:
            one.close()


@pytest.fixture
def lone(tmp_path: Path, cluster: RayCluster) -> Iterator[Lone]:
    made = Lone(tmp_path, cluster)
    yield made
    made.close()


def gone(process: psutil.Process, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_lost_node_is_noticed_and_a_new_one_is_used(lone: Lone, cluster: RayCluster) -> None:
    engine = lone.engine(resources={"seat": 1.0})
    for allocation in ("a-1", "a-2", "a-3"):
        engine.submit(lone.ask(allocation))
    running = [lone.until(engine, "a-1", "running"), lone.until(engine, "a-2", "running")]
    waiting = lone.until(engine, "a-3", "waiting")
    assert waiting.why.startswith("CPU 1, seat 1 is in use on all 2 nodes that have it")
    assert [offer.count for offer in engine.capacity() if "4 CPUs" in offer.kind] == [0]
    agent = lone.agent(running[0].allocation)
    raylet(agent.pid).kill()
    assert lone.until(engine, "a-1", "gone", GONE_WITHIN_S).why
    assert gone(agent, GONE_WITHIN_S), "an agent outlived its node"
    # One that waited for a place on the node that was lost may be lost with it.
    engine.submit(lone.ask("a-3"))
    assert lone.until(engine, "a-3", "waiting").why.startswith("CPU 1, seat 1 is in use on the only node that has it")
    cluster.add(**WORKER)
    lone.until(engine, "a-3", "running")


def test_ray_is_used_from_outside_the_cluster(lone: Lone, cluster: RayCluster) -> None:
    outside, within = lone.engine(address=cluster.client_address), lone.engine()
    lone.reached(outside)
    assert [offer.count for offer in outside.capacity() if "4 CPUs" in offer.kind] == [8]
    handle = outside.submit(lone.ask("a-1"))
    lone.until(outside, "a-1", "running")
    assert [one.handle for one in within.watch(lone.tag)] == [handle], "it is the same, from wherever it is seen"
    agent = lone.agent("a-1")
    outside.cancel(handle)
    assert gone(agent, GONE_WITHIN_S)
    assert lone.until(outside, "a-1", "gone").why


def test_agent_and_actor_end_together(lone: Lone) -> None:
    engine = lone.engine()
    for allocation in ("a-1", "a-2"):
        engine.submit(lone.ask(allocation))
    first, second = lone.agent("a-1"), lone.agent("a-2")
    below = [*first.children(recursive=True), *second.children(recursive=True)]
    psutil.Process(first.ppid()).kill()
    second.kill()
    assert gone(first, 10.0)
    assert all(gone(one, 10.0) for one in below), "something that an agent started outlived it"
    lone.until(engine, "a-1", "gone")
    assert lone.until(engine, "a-2", "gone").why.startswith("the agent ended with SIGKILL")


def test_next_allocation_removes_the_token_of_a_killed_actor(lone: Lone) -> None:
    engine = lone.engine()
    engine.submit(lone.ask("a-1"))
    agent = lone.agent("a-1")
    (token,) = lone.path.rglob("a-1/token")
    psutil.Process(agent.ppid()).kill()
    assert gone(agent, 10.0)
    engine.submit(lone.ask("a-2"))
    lone.agent("a-2")
    until(lambda: not token.exists(), "the end of the token")
    assert list(lone.path.rglob("a-2/token"))


@pytest.mark.parametrize("how", ["in its set-up", "when it listens", "when it hangs", "when it was killed"])
def test_nothing_that_an_allocation_started_outlives_it(lone: Lone, how: str) -> None:
    seconds = str(10_000 + secrets.randbelow(10_000))
    beside, forever = f"setsid sleep {seconds} &", f"sleep {seconds}"
    engine = lone.engine(setup=(beside, *((forever,) if how == "in its set-up" else ())))
    handle = engine.submit(lone.ask("a-1"))
    many = 2 if how == "in its set-up" else 1
    until(lambda: len(started(forever)) == many, "what the set-up starts")
    if how != "in its set-up":
        agent = lone.agent("a-1")
        {"when it listens": list, "when it hangs": agent.suspend, "when it was killed": agent.kill}[how]()
    if how == "when it was killed":
        lone.until(engine, "a-1", "gone")
    else:
        engine.cancel(handle)
    left = started(forever)
    for one in left:
        one.kill()
    assert not left


def started(command: str) -> list[psutil.Process]:
    """Return the running processes with this command line; one that waits to be reaped has ended."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if " ".join(process.info["cmdline"] or ()) == command and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_allocation_of_a_dead_process_is_found_and_not_started_twice(lone: Lone) -> None:
    before = lone.engine()
    handle = before.submit(lone.ask("a-1"))
    assert before._driver is not None
    before._driver.kill()
    later = lone.engine()
    assert lone.until(later, "a-1", "running").handle == handle
    agent = lone.agent("a-1")
    assert later.submit(lone.ask("a-1")) == handle
    assert before.submit(lone.ask("a-1")) == handle, "a dead driver is restarted"
    assert lone.agent("a-1") == agent
    later.cancel(handle)
    assert gone(agent, GONE_WITHIN_S)
    assert not list(lone.path.rglob("token")), "a token was left on a node"
    later.cancel(handle)
    later.submit(lone.ask("a-1"))
    assert lone.agent("a-1") != agent


def test_allocation_that_no_node_can_hold_waits(lone: Lone) -> None:
    never = lone.engine(gpus=64.0)
    never.submit(lone.ask("a-1"))
    why = lone.until(never, "a-1", "waiting").why
    assert why == ("no node has CPU 1, GPU 64; waiting for a node to join, or for the autoscaler to add one")
    assert all(offer.count == 0 for offer in never.capacity())
    never.cancel(never.watch(lone.tag)[0].handle)
    lone.until(never, "a-1", "gone")


def test_missing_resources_are_named(lone: Lone) -> None:
    engine = lone.engine()
    engine.submit(dataclasses.replace(lone.ask("a-1"), cpus=64))
    assert lone.until(engine, "a-1", "waiting").why.startswith("no node has CPU 64; waiting")


def test_labels_and_placement_groups_select_nodes(lone: Lone, cluster: RayCluster) -> None:
    here, nowhere = lone.engine(labels={"lab": "here"}, placement="spread"), lone.engine(labels={"lab": "!in(here,x)"})
    here.submit(lone.ask("a-1"))
    lone.until(here, "a-1", "running")
    assert sum(offer.count or 0 for offer in nowhere.capacity()) == 0
    grouped = lone.engine(group="ours", resources={"seat": 0.5})
    with pytest.raises(AllocationRefused, match="Ray rejected the request") as refused:
        grouped.submit(lone.ask("a-2"))
    assert "need one placement group named 'ours', found 0" in refused.value.why
    with make_group(cluster, "ours", {"CPU": 1, "seat": 1}):
        grouped.submit(lone.ask("a-2"))
        lone.until(grouped, "a-2", "running")
        grouped.cancel("shoal-" + lone.tag + "-a-2")


def test_drained_node_has_a_known_end(lone: Lone, cluster: RayCluster) -> None:
    engine = lone.engine()
    engine.submit(lone.ask("a-1"))
    assert lone.until(engine, "a-1", "running").ends_at is None
    home = raylet(lone.agent("a-1").pid)
    node = next(word.partition("=")[2] for word in home.cmdline() if word.startswith("--node_id="))
    drain = [sys.executable, "-P", "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    when = ["--deadline-remaining-seconds", "600"]
    subprocess.run([*drain, "--node-id", node, *why, *when], check=True, timeout=60.0)
    seen = lone.until(engine, "a-1", "running")
    assert seen.ends_at == pytest.approx(time.time() + 600.0, abs=60.0)
    assert seen.why == "Ray drains its node"
    home.kill()


def test_run_on_ray_survives_the_loss_of_a_node(lone: Lone, cluster: RayCluster, tmp_path: Path) -> None:
    told = {"address": cluster.address, "python": sys.executable, "directory": str(tmp_path / "home")}
    pool = "[pool.rays]\nengine = 'ray'\nlimit = 2\nshared = true\nresources = {seat = 1}\n"
    pool += f"setup = ['export RECORDS={tmp_path}/records STEPS=5000']\n"
    pool += "".join(f"{key} = '{value}'\n" for key, value in told.items())
    with pool_run(tmp_path, "rays", "1:2", pool, steps=5000) as run:
        run.until_size(2)
        raylet(next(iter(run.agents().values())).pid).kill()
        run.until_size(1)
        cluster.add(**WORKER)
        run.until_size(2)
        run.shoal("stop", run.name)
        run.until(lambda: run.process.poll() is not None, "the end of the run")
        assert {e["step"] for e in run.commits()} == set(range(1, run.step() + 1)), "a step was lost"
        run.check_leftovers()


def test_failed_start_of_an_agent_is_explained(lone: Lone) -> None:
    broken = lone.engine(setup=("echo no such module >&2", "false"))
    broken.submit(lone.ask("a-1"))
    assert lone.until(broken, "a-1", "gone").why == "the agent ended with exit code 1: no such module"
    missing = lone.engine(python="/nowhere/python")
    missing.submit(lone.ask("a-2"))
    why = lone.until(missing, "a-2", "gone").why
    assert "exit code 127" in why
    assert "/nowhere/python" in why


def test_errors_name_the_cause(lone: Lone, cluster: RayCluster, tmp_path: Path) -> None:
    with pytest.raises(AllocationRefused, match="invalid address of a Ray cluster"):
        lone.engine(address="http://127.0.0.1:8265").watch(lone.tag)
    with pytest.raises(AllocationRefused, match="cannot start the interpreter for Ray"):
        lone.engine(client="/nowhere/python").watch(lone.tag)
    without = script(tmp_path / "without", f'exec {sys.executable} -S "$@"')
    with pytest.raises(AllocationRefused, match="Ray is not installed on this machine"):
        lone.engine(client=without).watch(lone.tag)
    text = "import ray, runpy; ray.__version__ = '1.0.0'; runpy.run_path('{DRIVER}', run_name='__main__')"
    other = script(tmp_path / "other", f'exec {sys.executable} -c "{text.format(DRIVER=DRIVER)}" "$@"')
    with pytest.raises(AllocationRefused, match="another version of Ray or Python"):
        lone.engine(client=other).watch(lone.tag)
    with pytest.raises(AllocationRefused, match="Ray rejected the request"):
        lone.engine(labels={"a b": "?"}).submit(lone.ask("a-1"))


def test_lost_head_node_is_unreachable_within_seconds(lone: Lone, cluster: RayCluster) -> None:
    began = time.monotonic()
    with pytest.raises(EngineUnreachable, match="cannot reach the Ray cluster"):
        lone.engine(address="127.0.0.1:9").watch(lone.tag)
    with pytest.raises(EngineUnreachable, match="cannot reach the Ray cluster"):
        lone.engine(address="ray://no.such.host.invalid:10001").watch(lone.tag)
    with cluster.headless(), pytest.raises(EngineUnreachable, match="cannot reach the Ray cluster"):
        lone.engine().watch(lone.tag)
    assert time.monotonic() - began < 30.0
    assert lone.engine().watch(lone.tag) == []


def script(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


@contextlib.contextmanager
def make_group(cluster: RayCluster, name: str, bundle: dict[str, float]) -> Iterator[None]:
    """Create a placement group from another process, in another namespace."""
    text = (
        "import ray, sys\n"
        f"ray.init(address={cluster.address!r}, namespace='other', log_to_driver=False)\n"
        f"group = ray.util.placement_group([{bundle!r}], name={name!r})\n"
        "ray.get(group.ready(), timeout=180)\n"
        "print('made', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert "made" in iter(process.stdout.readline, "").__next__()
        yield
    finally:
        process.stdin.close()
        process.wait(180)
