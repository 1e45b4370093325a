"""Carries out what the supply decides: one thread for each pool, which asks its engine for one kind of thing at a time.

So what an engine says of its hires never contradicts what it was asked before. Machines that are hired one right after
the other are asked for together, and so are those that are let go: with many hosts, each would wait for all before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shoal.coordinator.service import Service
from shoal.core import fleet_events as fe
from shoal.core import supply
from shoal.core import supply_events as se
from shoal.core.supply import ASKED
from shoal.engines import pools
from shoal.engines.engine import Ask, Engine
from shoal.errors import EngineUnreachable, HireRefused, ShoalError
from shoal.wire import credentials
from shoal.wire.hires import hiring_of

LOOK_S = 1.0
CALM_LOOK_S = 5.0
CLOSE_S = 45.0
AT_ONCE = 16
NOTICE_S = 60.0

Ends = tuple[tuple[str, float], ...]

log = logging.getLogger("shoal.hiring")


class Hiring:
    """The pools of one coordinator. `ask_of` makes a hire of a pool, and its slots, into what is to be started."""

    def __init__(self, service: Service, engines: Mapping[str, Engine], ask_of: Callable[[str, str, int], Ask]) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._desks = {
            name: _Desk(name, engine, ask_of, self._said, self._told_ends) for name, engine in engines.items()
        }
        service.hire = self.carry_out
        service.at_every_tick(self._look_out)
        for desk in self._desks.values():
            desk.start()

    def carry_out(self, instruction: se.Instruction) -> None:
        if isinstance(instruction, se.Submit | se.Cancel) and instruction.pool in self._desks:
            self._desks[instruction.pool].put(instruction)

    def close(self, end_all: bool) -> None:
        """Stop asking; if nobody is to come after us, end whatever was hired."""
        for desk in self._desks.values():
            desk.stop(end_all)
        deadline = time.monotonic() + CLOSE_S
        for desk in self._desks.values():
            desk.join(max(0.0, deadline - time.monotonic()))

    def _look_out(self, now: float) -> None:
        state = self._service.runs.supply
        for event in supply.due(state, now):
            self._service.attempt(partial(self._service.handle, "", event))
        for name, desk in self._desks.items():
            desk.busy = any(hire.pool == name for hire in state.hires.values())

    def _said(self, event: se.Event) -> None:
        """In the thread of a desk."""
        self._loop.call_soon_threadsafe(self._take, event)

    def _told_ends(self, ends: Ends) -> None:
        """In the thread of a desk."""
        self._loop.call_soon_threadsafe(self._warn, ends)

    def _warn(self, ends: Ends) -> None:
        """A machine that its engine is about to end has a notice, whether or not anybody there has heard of it."""
        now = time.time()
        for hire, until in ends:
            agent = self._service.runs.fleet.agents.get(hire)
            if agent is not None and agent.usable and until - now < NOTICE_S:
                left_s = max(0.0, until - now)
                notice = fe.AgentNotice(hire, left_s, f"its engine ends it in {left_s:.0f} s")
                self._service.attempt(partial(self._service.handle, "", notice))

    def _take(self, event: se.Event) -> None:
        state = self._service.runs.supply
        if isinstance(event, se.Observed):
            asking = self._desks[event.pool].asking
            mine = [hire for hire in state.hires.values() if hire.pool == event.pool]
            unanswered = tuple(h.name for h in mine if h.status == ASKED and h.name not in asking)
            event = se.Observed(event.pool, event.seen, event.ended, unanswered)
            if not supply.is_news(state, event):
                return
        elif isinstance(event, se.PoolUnreachable):
            standing = state.standings.get(event.pool, supply.Standing())
            if standing.unreachable_since is not None:
                return
        if isinstance(event, se.Submitted | se.Refused):
            self._desks[event.pool].asking.discard(event.hire)
        self._service.attempt(partial(self._service.handle, "", event))


class _Desk(threading.Thread):
    """Where one pool is asked. `asking` are those whose submission has not been heard of; `busy` that it has hires."""

    def __init__(
        self,
        pool: str,
        engine: Engine,
        ask_of: Callable[[str, str, int], Ask],
        said: Callable[[se.Event], None],
        ends: Callable[[Ends], None],
    ) -> None:
        super().__init__(name=f"shoal-pool-{pool}", daemon=True)
        self._pool, self._engine, self._ask_of, self._said, self._ends = pool, engine, ask_of, said, ends
        self._tag = ask_of(pool, "", 0).tag
        self._line: queue.Queue[se.Submit | se.Cancel | None] = queue.Queue()
        self._stopped = threading.Event()
        self._end_all = False
        self.asking: set[str] = set()
        self.busy = True

    def put(self, instruction: se.Submit | se.Cancel) -> None:
        if isinstance(instruction, se.Submit):
            self.asking.add(instruction.hire)
        self._line.put(instruction)

    def stop(self, end_all: bool) -> None:
        self._end_all = end_all
        self._stopped.set()
        self._line.put(None)

    def run(self) -> None:
        look_at = 0.0
        while not self._stopped.is_set():
            if time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + (LOOK_S if self.busy else CALM_LOOK_S)
            try:
                asked = self._line.get(timeout=max(0.01, look_at - time.monotonic()))
            except queue.Empty:
                continue
            for group in together([asked, *self._waiting()]):
                if not self._stopped.is_set():
                    self._do_all(group)
        if self._end_all:
            self._end_everything()
        self._engine.close()

    def _waiting(self) -> list[se.Submit | se.Cancel | None]:
        """What was asked for meanwhile."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._line.get_nowait())
        return found

    def _do_all(self, group: Sequence[se.Submit | se.Cancel]) -> None:
        if len(group) == 1:
            self._do(group[0])
            return
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(self._do, group))

    def _do(self, asked: se.Submit | se.Cancel) -> None:
        try:
            if isinstance(asked, se.Submit):
                self._submit(asked)
            elif asked.handle:
                self._engine.cancel(asked.handle)
                self._said(se.Ended(asked.hire))
        except EngineUnreachable as error:
            # What is to end is asked again by the supply; what is to begin, when the pool can be reached.
            self._said(se.PoolUnreachable(self._pool, _in_short(error)))
            if isinstance(asked, se.Submit):
                self._said(se.Refused(self._pool, asked.hire, _in_short(error)))
        except ShoalError as error:
            log.warning("pool %s: %s", self._pool, error)
            self._said(se.Refused(self._pool, asked.hire, _in_short(error)))

    def _submit(self, asked: se.Submit) -> None:
        try:
            handle = self._engine.submit(self._ask_of(self._pool, asked.hire, asked.slots))
        except OSError as error:
            raise HireRefused("the engine could not be asked", why=str(error)) from error
        self._said(se.Submitted(self._pool, asked.hire, handle))

    def _look(self) -> None:
        try:
            found = self._engine.watch(self._tag)
        except ShoalError as error:
            self._said(se.PoolUnreachable(self._pool, _in_short(error)))
            return
        # Two pools may be of one cluster: each looks after its own.
        mine = [one for one in sorted(found, key=lambda one: one.hire) if se.pool_of(one.hire) == self._pool]
        seen = tuple(
            se.Sighting(one.hire, one.handle, one.state == "running", one.why) for one in mine if one.state != "gone"
        )
        self._said(se.Observed(self._pool, seen, tuple((one.hire, one.why) for one in mine if one.state == "gone")))
        self._ends(tuple((one.hire, one.until) for one in mine if one.until is not None and one.state == "running"))

    def _end_everything(self) -> None:
        try:
            found = self._engine.watch(self._tag)
        except ShoalError as error:
            log.error("pool %s may have something left of this coordinator: %s", self._pool, error)
            return
        mine = [one.handle for one in found if se.pool_of(one.hire) == self._pool and one.state != "gone"]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(self._end, mine))

    def _end(self, handle: str) -> None:
        try:
            self._engine.cancel(handle)
        except ShoalError as error:
            log.error("%s of pool %s may be left of this coordinator: %s", handle, self._pool, error)


def together(asked: Iterable[se.Submit | se.Cancel | None]) -> list[list[se.Submit | se.Cancel]]:
    """What can be asked at the same time: what is of one kind and in a row; None asks for nothing."""
    real = [one for one in asked if one is not None]
    return [list(group) for _, group in itertools.groupby(real, key=type)]


def open_pools(service: Service, directory: Path) -> Hiring | None:
    """Hire from the pools that the coordinator's directory describes; None if there are none."""
    hires = hiring_of(directory)
    if hires is None:
        return None
    found = {name: pools.parse(name, table, str(directory)) for name, table in hires.pools.items()}
    known = tuple(pool for pool, _ in found.values())
    if known != tuple(service.runs.supply.pools.values()):
        service.handle("", se.PoolsKnown(known))
    token = credentials.read(directory / "token")
    url = (directory / "url").read_text("ascii").strip()

    def ask_of(pool: str, hire: str, slots: int) -> Ask:
        apart = () if found[pool][1].shared else ("--apart",)
        return Ask(hire, service.name, url, token, slots or None, (*hires.agent, *apart))

    return Hiring(service, {name: engine for name, (_, engine) in found.items()}, ask_of)


def _in_short(error: ShoalError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what
