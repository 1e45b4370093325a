"""What every engine must do, with real agents and a real coordinator: start, find again, end, and leave nothing behind.

Whoever adds an engine describes a place where it really runs, and the scenarios do the rest::

    class Mine(Site):
        def engine(self): ...
        def kill(self, hire): ...

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
    def test_mine_does_what_engines_do(scenario, tmp_path):
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
from shoal.wire import credentials

PATIENCE_S = 60.0
LOOK_S = 0.1
TOKEN_BYTES = 24


class EngineSite(ABC):
    """A place where an engine really runs, and a coordinator that its agents can reach at `host`.

    `slow` multiplies the patience, for engines that take their time.
    """

    host = "127.0.0.1"
    slow = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tag = f"t{secrets.token_hex(3)}"
        self.client: ApiClient
        self._coordinator: subprocess.Popen[bytes] | None = None

    # --- what an engine's tests have to say

    @abstractmethod
    def engine(self) -> Engine:
        """A new engine for the same pool, as a coordinator that was just started would make it."""

    @abstractmethod
    def kill(self, hire: str) -> None:
        """End the agent of a hire, and whatever holds it, without a word to the engine that submitted it."""

    @abstractmethod
    def cut(self) -> contextlib.AbstractContextManager[None]:
        """While it is entered, the engine cannot be reached; what runs goes on."""

    # --- what scenarios do

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
        for seen in engine.watch(self.tag):
            engine.cancel(seen.handle)
        engine.close()
        if self._coordinator is not None:
            self._coordinator.terminate()
            self._coordinator.wait(PATIENCE_S)

    def ask(self, hire: str, slots: int = 1) -> AllocationRequest:
        found = credentials.read(self.path / "coordinator" / "token")
        return AllocationRequest(
            hire, self.tag, self.client.url, found, slots, ("--preload", "msgspec", "--grace", "2")
        )

    def until(self, ready: Callable[[], object], what: str) -> None:
        """Wait, not for ever."""
        deadline = time.monotonic() + PATIENCE_S * self.slow
        while not ready():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {PATIENCE_S * self.slow:g} s for {what}\n{self._log()}")
            time.sleep(LOOK_S)

    def agents(self) -> set[str]:
        """The agents that the coordinator hears."""
        return {one.agent for one in self.client.agents() if one.connected}

    def until_agents(self, *hires: str) -> None:
        self.until(lambda: self.agents() == set(hires), f"the agents to be {', '.join(hires) or 'none'}")

    def seen(self, engine: Engine) -> dict[str, AllocationStatus]:
        """What is there or waits to be, by name."""
        return {one.allocation: one for one in engine.watch(self.tag) if one.state != "gone"}

    def _log(self) -> str:
        return (self.path / "coordinator.log").read_text(errors="replace")[-2000:]


# --- scenarios


def starts_as_many_as_are_asked_for(site: EngineSite) -> None:
    engine = site.engine()
    for hire in ("pool-1", "pool-2"):
        engine.submit(site.ask(hire))
    site.until_agents("pool-1", "pool-2")
    assert {one.state for one in site.seen(engine).values()} == {"running"}
    engine.submit(site.ask("pool-3"))
    site.until_agents("pool-1", "pool-2", "pool-3")


def ends_the_one_that_is_cancelled_and_no_other(site: EngineSite) -> None:
    engine = site.engine()
    handles = {hire: engine.submit(site.ask(hire)) for hire in ("pool-1", "pool-2")}
    site.until_agents("pool-1", "pool-2")
    engine.cancel(handles["pool-1"])
    site.until(lambda: set(site.seen(engine)) == {"pool-2"}, "pool-1 to be gone")
    site.until_agents("pool-2")
    engine.cancel(handles["pool-1"])


def starts_nothing_twice(site: EngineSite) -> None:
    engine = site.engine()
    first = engine.submit(site.ask("pool-1"))
    assert engine.submit(site.ask("pool-1")) == first
    site.until_agents("pool-1")
    running = _agents_of(site.tag)
    assert site.engine().submit(site.ask("pool-1")) == first
    time.sleep(1.0)
    assert _agents_of(site.tag) == running
    assert len(site.seen(engine)) == 1


def sees_what_was_killed_from_outside(site: EngineSite) -> None:
    engine = site.engine()
    for hire in ("pool-1", "pool-2"):
        engine.submit(site.ask(hire))
    site.until_agents("pool-1", "pool-2")
    site.kill("pool-1")
    site.until(lambda: set(site.seen(engine)) == {"pool-2"}, "the engine to see that pool-1 was killed")
    site.kill("pool-2")
    site.until(lambda: not site.seen(engine), "the engine to see that all were killed")
    engine.submit(site.ask("pool-3"))
    site.until(lambda: "pool-3" in site.agents(), "another agent")


def finds_what_an_earlier_coordinator_started(site: EngineSite) -> None:
    before = site.engine()
    handles = {hire: before.submit(site.ask(hire)) for hire in ("pool-1", "pool-2")}
    site.until_agents("pool-1", "pool-2")
    before.close()
    later = site.engine()
    assert {one.allocation: one.handle for one in site.seen(later).values()} == handles
    for handle in handles.values():
        later.cancel(handle)
    site.until(lambda: not site.seen(later), "all to be gone")
    site.until_agents()


def says_when_it_cannot_be_reached_and_goes_on_after(site: EngineSite) -> None:
    engine = site.engine()
    engine.submit(site.ask("pool-1"))
    site.until_agents("pool-1")
    with site.cut():
        site.until(lambda: _is_unreachable(engine, site.tag), "the engine to say that it cannot be reached")
        assert site.agents() == {"pool-1"}, "what runs goes on"
    site.until(lambda: not _is_unreachable(engine, site.tag), "the engine to be reached again")
    assert set(site.seen(engine)) == {"pool-1"}
    engine.submit(site.ask("pool-2"))
    site.until_agents("pool-1", "pool-2")


def shows_no_secret(site: EngineSite) -> None:
    engine, ask = site.engine(), site.ask("pool-1")
    rendered = engine.render(ask)
    shown = " ".join((*rendered.argv, rendered.text, *rendered.env.values()))
    assert ask.credentials.token not in shown
    assert ask.allocation in shown
    engine.submit(ask)
    site.until_agents("pool-1")
    assert not [argv for argv in _command_lines().values() if ask.credentials.token in argv], (
        "the token is in a command line"
    )


def says_what_could_be_had(site: EngineSite) -> None:
    offers = site.engine().capacity()
    assert offers
    assert all(one.count is None or one.count >= 0 for one in offers)


SCENARIOS = (
    starts_as_many_as_are_asked_for,
    ends_the_one_that_is_cancelled_and_no_other,
    starts_nothing_twice,
    sees_what_was_killed_from_outside,
    finds_what_an_earlier_coordinator_started,
    says_when_it_cannot_be_reached_and_goes_on_after,
    shows_no_secret,
    says_what_could_be_had,
)


def _is_unreachable(engine: Engine, tag: str) -> bool:
    try:
        engine.watch(tag)
    except EngineUnreachable:
        return True
    return False


def _agents_of(tag: str, hire: str = "") -> set[int]:
    """The processes of agents with this tag, all or those of one hire, on any host of this machine.

    What an agent is about to start shows its command line too, for as long as it has not become something else.
    """
    words = (" shoal.agent ", f"/{tag}/", f" --name {hire} " if hire else "")
    found = {pid for pid, argv in _command_lines().items() if all(word in argv for word in words)}
    return {pid for pid in found if _parent(pid) not in found}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _command_lines() -> dict[int, str]:
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found[int(pid)] = Path("/proc", pid, "cmdline").read_text(errors="replace").replace("\0", " ")
    return found
