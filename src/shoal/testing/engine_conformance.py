"""Conformance suite of engines, with real agents and a real coordinator: start, find again, cancel, leave nothing.

To add an engine, describe a site where it really runs, and run the scenarios over it::

    class Mine(EngineSite):
        def engine(self): ...
        def kill(self, allocation): ...
        def cut(self): ...

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
    def test_my_engine_conforms(scenario, tmp_path):
        with Mine(tmp_path) as site:
            scenario(site)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from shoal.engines.engine import AllocationRequest, AllocationStatus, Engine
from shoal.errors import EngineUnreachable
from shoal.launch.api_client import ApiClient, open_client
from shoal.testing.wait import TIMEOUT_S, until
from shoal.wire import credentials

TOKEN_BYTES = 24


class EngineSite(ABC):
    """Site where an engine really runs, and a coordinator that its agents can reach at `host`.

    `slow` multiplies the deadlines, for engines that take their time.
    """

    host = "127.0.0.1"
    slow = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tag = f"t{secrets.token_hex(3)}"
        self.client: ApiClient
        self._coordinator: subprocess.Popen[bytes] | None = None

    # --- what the tests of an engine provide

    @abstractmethod
    def engine(self) -> Engine:
        """Return a new engine for the same pool, as a restarted coordinator would create it."""

    @abstractmethod
    def kill(self, allocation: str) -> None:
        """Kill the agent of an allocation, and what holds it, behind the back of the engine."""

    @abstractmethod
    def cut(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the engine's service is unreachable, while running agents continue."""

    # --- what scenarios use

    def __enter__(self) -> EngineSite:
        directory = self.path / "coordinator"
        directory.mkdir()
        with (self.path / "coordinator.log").open("ab") as log:
            argv = [sys.executable, "-P", "-m", "shoal.coordinator", "--dir", str(directory), "--host", self.host]
            self._coordinator = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        self.until(lambda: (directory / "url").exists(), "the coordinator")
        self.client = open_client((directory / "url").read_text().strip(), str(directory / "token"))
        return self

    def __exit__(self, *_: object) -> None:
        engine = self.engine()
        for status in engine.watch(self.tag):
            engine.cancel(status.handle)
        engine.close()
        if self._coordinator is not None:
            self._coordinator.terminate()
            self._coordinator.wait(TIMEOUT_S)

    def request(self, allocation: str, slots: int = 1) -> AllocationRequest:
        """Return a request for one agent."""
        access = credentials.read(self.path / "coordinator" / "token")
        return AllocationRequest(
            allocation, self.tag, self.client.url, access, slots, ("--preload", "msgspec", "--grace", "2")
        )

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Block until the condition holds; fail with the coordinator's log after the deadline."""
        until(condition, what, TIMEOUT_S * self.slow, details=self._log, poll_s=0.1)

    def agents(self) -> set[str]:
        """Return the agents that are connected to the coordinator."""
        return {view.agent for view in self.client.agents() if view.connected}

    def until_agents(self, *names: str) -> None:
        self.until(lambda: self.agents() == set(names), f"the agents to be {', '.join(names) or 'none'}")

    def allocations(self, engine: Engine) -> dict[str, AllocationStatus]:
        """Return the allocations that run or are pending, by name."""
        return {status.allocation: status for status in engine.watch(self.tag) if status.state != "gone"}

    def _log(self) -> str:
        return (self.path / "coordinator.log").read_text(errors="replace")[-2000:]


# --- scenarios


def starts_one_agent_per_request(site: EngineSite) -> None:
    engine = site.engine()
    for name in ("pool-1", "pool-2"):
        engine.submit(site.request(name))
    site.until_agents("pool-1", "pool-2")
    assert {status.state for status in site.allocations(engine).values()} == {"running"}
    engine.submit(site.request("pool-3"))
    site.until_agents("pool-1", "pool-2", "pool-3")


def cancels_only_the_given_allocation(site: EngineSite) -> None:
    engine = site.engine()
    handles = {name: engine.submit(site.request(name)) for name in ("pool-1", "pool-2")}
    site.until_agents("pool-1", "pool-2")
    engine.cancel(handles["pool-1"])
    site.until(lambda: set(site.allocations(engine)) == {"pool-2"}, "pool-1 to be gone")
    site.until_agents("pool-2")
    engine.cancel(handles["pool-1"])


def repeated_submit_starts_nothing(site: EngineSite) -> None:
    engine = site.engine()
    first = engine.submit(site.request("pool-1"))
    assert engine.submit(site.request("pool-1")) == first
    site.until_agents("pool-1")
    running = agent_pids(site.tag)
    assert site.engine().submit(site.request("pool-1")) == first
    time.sleep(1.0)
    assert agent_pids(site.tag) == running
    assert len(site.allocations(engine)) == 1


def notices_agents_killed_from_outside(site: EngineSite) -> None:
    engine = site.engine()
    for name in ("pool-1", "pool-2"):
        engine.submit(site.request(name))
    site.until_agents("pool-1", "pool-2")
    site.kill("pool-1")
    site.until(lambda: set(site.allocations(engine)) == {"pool-2"}, "the engine to see that pool-1 was killed")
    site.kill("pool-2")
    site.until(lambda: not site.allocations(engine), "the engine to see that all were killed")
    engine.submit(site.request("pool-3"))
    site.until(lambda: "pool-3" in site.agents(), "another agent")


def finds_allocations_of_an_earlier_coordinator(site: EngineSite) -> None:
    before = site.engine()
    handles = {name: before.submit(site.request(name)) for name in ("pool-1", "pool-2")}
    site.until_agents("pool-1", "pool-2")
    before.close()
    later = site.engine()
    assert {name: status.handle for name, status in site.allocations(later).items()} == handles
    for handle in handles.values():
        later.cancel(handle)
    site.until(lambda: not site.allocations(later), "all to be gone")
    site.until_agents()


def reports_an_unreachable_service_and_recovers(site: EngineSite) -> None:
    engine = site.engine()
    engine.submit(site.request("pool-1"))
    site.until_agents("pool-1")
    with site.cut():
        site.until(lambda: _is_unreachable(engine, site.tag), "the engine to report that it is unreachable")
        assert site.agents() == {"pool-1"}, "a running agent was lost"
    site.until(lambda: not _is_unreachable(engine, site.tag), "the engine to be reached again")
    assert set(site.allocations(engine)) == {"pool-1"}
    engine.submit(site.request("pool-2"))
    site.until_agents("pool-1", "pool-2")


def keeps_the_token_out_of_command_lines(site: EngineSite) -> None:
    engine, request = site.engine(), site.request("pool-1")
    rendered = engine.render(request)
    shown = " ".join((*rendered.argv, rendered.text, *rendered.env.values()))
    assert request.credentials.token not in shown
    assert request.allocation in shown
    engine.submit(request)
    site.until_agents("pool-1")
    assert not [argv for argv in _command_lines().values() if request.credentials.token in argv], (
        "the token is in a command line"
    )


def lists_its_capacity(site: EngineSite) -> None:
    capacity = site.engine().capacity()
    assert capacity
    assert all(offer.count is None or offer.count >= 0 for offer in capacity)


SCENARIOS = (
    starts_one_agent_per_request,
    cancels_only_the_given_allocation,
    repeated_submit_starts_nothing,
    notices_agents_killed_from_outside,
    finds_allocations_of_an_earlier_coordinator,
    reports_an_unreachable_service_and_recovers,
    keeps_the_token_out_of_command_lines,
    lists_its_capacity,
)


def _is_unreachable(engine: Engine, tag: str) -> bool:
    try:
        engine.watch(tag)
    except EngineUnreachable:
        return True
    return False


def agent_pids(tag: str, allocation: str = "") -> set[int]:
    """Return the process ids of the agents with this tag, all or those of one allocation.

    A child that an agent has just forked shows the same command line until it execs, so children are left out.
    """
    words = (" shoal.agent ", f"/{tag}/", f" --name {allocation} " if allocation else "")
    pids = {pid for pid, argv in _command_lines().items() if all(word in argv for word in words)}
    return {pid for pid in pids if _parent(pid) not in pids}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _command_lines() -> dict[int, str]:
    command_lines = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command_lines[int(pid)] = Path("/proc", pid, "cmdline").read_text(errors="replace").replace("\0", " ")
    return command_lines
