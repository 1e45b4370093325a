"""Carries out what the supply decides: one thread for each pool, which asks its engine for one kind of thing at a time.

So what an engine says of its hires never contradicts what it was asked before. Machines that are hired one right after
the other are asked for together, and so are those that are let go: with many hosts, each would wait for all before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import queue
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from shoal.coordinator.blobs import STOWED, Blobs
from shoal.coordinator.service import Service
from shoal.core import fleet_events as fe
from shoal.core import spending, supply
from shoal.core import supply_events as se
from shoal.core.supply import ASKED
from shoal.engines import grace, pools
from shoal.engines.engine import Ask, Engine, Seen, agent_options
from shoal.errors import EngineUnreachable, HireRefused, ShoalError
from shoal.pack import environment
from shoal.pack.environment import Environment
from shoal.wire import credentials
from shoal.wire.hires import LEAVING, Leaving, hiring_of, say_leaving, urls_of

LOOK_S = 1.0
CALM_LOOK_S = 5.0
CLOSE_S = 45.0
TELL_S = 0.2
AT_ONCE = 16
NOTICE_S = 60.0
TIDY_FIRST_S = 30.0
TIDY_S = 900.0
TAG = "tag"
# What an agent and its warm process hold themselves, besides the members.
AGENT_BYTES = 512 << 20

Ends = tuple[tuple[str, float], ...]

log = logging.getLogger("shoal.hiring")


class Hiring:
    """The pools of one coordinator, whose hires have this `tag`.

    `ask_of` makes what the supply asks for into what is to be started.
    """

    def __init__(
        self,
        service: Service,
        tag: str,
        engines: Mapping[str, Engine],
        ask_of: Callable[[se.Submit], Ask],
        grace_s: float = grace.USUAL_S,
    ) -> None:
        self._service, self._grace_s = service, grace_s
        self._loop = asyncio.get_running_loop()
        self._money_at = 0.0
        self._desks = {
            name: _Desk(name, tag, engine, ask_of, self._said, self._told_ends) for name, engine in engines.items()
        }
        service.hire = self.carry_out
        service.at_every_tick(self._look_out)
        for desk in self._desks.values():
            desk.start()

    def carry_out(self, instruction: se.Instruction) -> None:
        if isinstance(instruction, se.Submit | se.Cancel) and instruction.pool in self._desks:
            self._desks[instruction.pool].put(instruction)

    async def close(self, end_all: bool) -> None:
        """Stop asking; if nobody is to come after us, end whatever was hired."""
        for desk in self._desks.values():
            desk.stop(end_all)
        await asyncio.to_thread(self._give_back if end_all else self._join)
        # Here, as everything that is journaled: agents still say goodbye meanwhile.
        for name, desk in self._desks.items():
            if desk.all_ended:
                # It may be long until somebody looks again, and nothing of it is paid for until then.
                self._service.attempt(partial(self._service.record, "", se.PoolClosed(name)))

    def _join(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        for desk in self._desks.values():
            desk.join(max(0.0, deadline - time.monotonic()))

    def _give_back(self) -> None:
        """Until nothing is left, or nothing has ended for as long as all that is left may take."""
        heard: dict[_Desk, tuple[int, float]] = {}
        while busy := [desk for desk in self._desks.values() if desk.is_alive()]:
            now = time.monotonic()
            for desk in busy:
                if desk not in heard or heard[desk][0] != desk.done:
                    heard[desk] = (desk.done, now + desk.leave_s(self._grace_s))
            left, left_s = sum(desk.left for desk in busy), max(heard[desk][1] for desk in busy) - now
            if left_s <= 0:
                log.error("%d hires may be left of this coordinator: its engines do not answer", left)
                break
            with contextlib.suppress(OSError):  # a full disk keeps nothing from being given back
                say_leaving(self._service.directory, Leaving(left, time.time() + left_s))
            busy[0].join(TELL_S)
        (self._service.directory / LEAVING).unlink(missing_ok=True)

    def _look_out(self, now: float) -> None:
        state = self._service.runs.supply
        due = supply.due(state, now)
        if now - self._money_at >= spending.LOOK_S:
            self._money_at = now
            due += supply.money_due(state, now)
        for event in due:
            self._service.attempt(partial(self._service.handle, "", event))
        for name, desk in self._desks.items():
            desk.known = frozenset(hire.name for hire in state.hires.values() if hire.pool == name)

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
    """Where one pool is asked. `asking` are those whose submission has not been heard of, `known` all that it has.

    `done` counts what its engine has done. `all_ended` says after its end that none of its hires is left.
    """

    def __init__(
        self,
        pool: str,
        tag: str,
        engine: Engine,
        ask_of: Callable[[se.Submit], Ask],
        said: Callable[[se.Event], None],
        ends: Callable[[Ends], None],
    ) -> None:
        super().__init__(name=f"shoal-pool-{pool}", daemon=True)
        self._pool, self._engine, self._ask_of, self._said, self._ends = pool, engine, ask_of, said, ends
        self._tag = tag
        self._line: queue.Queue[se.Submit | se.Cancel | None] = queue.Queue()
        self._stopped = threading.Event()
        self._end_all = False
        self.asking: set[str] = set()
        self.known: frozenset[str] | None = None
        self.done = 0
        self.all_ended = False
        self._ending: int | None = None

    @property
    def left(self) -> int:
        """How many hires it has."""
        return len(self.known or ()) if self._ending is None else self._ending

    def leave_s(self, grace_s: float) -> float:
        """How long it may take to end all of them, if agents have so long to hand over."""
        return self._engine.leave_s(grace_s) * max(1, math.ceil(self.left / AT_ONCE))

    def put(self, instruction: se.Submit | se.Cancel) -> None:
        if isinstance(instruction, se.Submit):
            self.asking.add(instruction.hire)
        self._line.put(instruction)

    def stop(self, end_all: bool) -> None:
        self._end_all = end_all
        self._stopped.set()
        self._line.put(None)

    def run(self) -> None:
        look_at, tidy_at = 0.0, time.monotonic() + TIDY_FIRST_S
        while not self._stopped.is_set():
            if time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + (LOOK_S if self.known is None or self.known else CALM_LOOK_S)
            if time.monotonic() >= tidy_at:
                self._tidy()
                tidy_at = time.monotonic() + TIDY_S
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
            for one in as_completed([threads.submit(self._do, asked) for asked in group]):
                one.result()
                self.done += 1

    def _do(self, asked: se.Submit | se.Cancel) -> None:
        try:
            with _blamed():
                if isinstance(asked, se.Submit):
                    self._submit(asked)
                elif asked.handle:
                    self._engine.cancel(asked.handle)
                    self._said(se.Ended(asked.hire))
        except EngineUnreachable as error:
            # What is to end is asked again by the supply; what is to begin, when the pool can be reached.
            self._said(se.PoolUnreachable(self._pool, *_told(error)))
            if isinstance(asked, se.Submit):
                self._said(se.Refused(self._pool, asked.hire, *_told(error)))
        except ShoalError as error:
            log.warning("pool %s: %s", self._pool, error)
            if isinstance(asked, se.Submit):
                final = isinstance(error, HireRefused)
                self._said(se.Refused(self._pool, asked.hire, *_told(error), final=final))

    def _submit(self, asked: se.Submit) -> None:
        try:
            handle = self._engine.submit(self._ask_of(asked))
        except OSError as error:
            raise HireRefused("the engine could not be asked", why=str(error)) from error
        self._said(se.Submitted(self._pool, asked.hire, handle))

    def _look(self) -> None:
        try:
            with _blamed():
                found = self._engine.watch(self._tag)
        except ShoalError as error:
            final = isinstance(error, HireRefused)
            self._said(se.PoolUnreachable(self._pool, *_told(error), final=final))
            return
        # Two pools may be of one cluster: each looks after its own.
        mine = [one for one in sorted(found, key=lambda one: one.hire) if se.pool_of(one.hire) == self._pool]
        seen = tuple(
            se.Sighting(one.hire, one.handle, one.state == "running", one.why) for one in mine if one.state != "gone"
        )
        self._said(se.Observed(self._pool, seen, tuple((one.hire, one.why) for one in mine if one.state == "gone")))
        self._ends(tuple((one.hire, one.until) for one in mine if one.until is not None and one.state == "running"))

    def _tidy(self) -> None:
        """What was left by hires that are gone is nobody's worry but the disk's."""
        try:
            with _blamed():
                self._engine.tidy(self._tag, self.known or ())
        except ShoalError as error:
            log.warning("pool %s: what ended hires left could not be removed: %s", self._pool, error)

    def _end_everything(self) -> None:
        try:
            with _blamed():
                found = self._engine.watch(self._tag)
        except ShoalError as error:
            log.error("pool %s may have something left of this coordinator: %s", self._pool, error)
            return
        self.done += 1
        # Those that ended by themselves have left their tokens.
        mine = [one for one in found if se.pool_of(one.hire) == self._pool]
        self._ending = len(mine)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            ends = [threads.submit(self._end, one) for one in mine]
            for _ in as_completed(ends):
                self._ending, self.done = self._ending - 1, self.done + 1
        self.all_ended = all(one.result() for one in ends)

    def _end(self, one: Seen) -> bool:
        try:
            with _blamed():
                self._engine.cancel(one.handle)
        except ShoalError as error:
            if one.state != "gone":
                log.error("%s of pool %s may be left of this coordinator: %s", one.handle, self._pool, error)
                return False
        return True


class Wardrobe:
    """The environments of pools, put where machines can fetch them when one is first asked for."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._made: dict[str, Environment] = {}
        self._lock = threading.Lock()

    def get(self, text: str) -> Environment | None:
        """The environment that a pool names, None if it names none; in the thread of a desk."""
        if not text:
            return None
        with self._lock:
            if text not in self._made:
                self._made[text] = environment.stow(text, self._blobs.add)
            return self._made[text]


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
    (directory / LEAVING).unlink(missing_ok=True)
    token, tag = credentials.read(directory / "token"), tag_of(directory)
    url = ",".join(urls_of(directory))

    if not service.runs.supply.hires:
        # Only hires fetch from there, also those that were queued before this coordinator was started.
        shutil.rmtree(directory / STOWED, ignore_errors=True)
    wardrobe = Wardrobe(Blobs(directory / STOWED))

    def ask_of(asked: se.Submit) -> Ask:
        engine = found[asked.pool][1]
        options = agent_options(hires.agent, engine)
        memory_bytes = asked.memory_bytes * asked.slots + AGENT_BYTES if asked.memory_bytes else 0
        size, made = (asked.cpus * asked.slots, memory_bytes), wardrobe.get(engine.options.environment)
        return Ask(asked.hire, tag, url, token, asked.slots, options, *size, made)

    engines = {name: engine for name, (_, engine) in found.items()}
    hiring = Hiring(service, tag, engines, ask_of, grace.in_options(hires.agent))
    known = tuple(pool for pool, _ in found.values())
    if known != tuple(service.runs.supply.pools.values()):
        service.handle("", se.PoolsKnown(known))
    return hiring


@contextlib.contextmanager
def _blamed() -> Iterator[None]:
    """Whatever else an engine raises: it is asked again, since somebody pays for what it has."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        log.exception("an engine failed as none should")
        raise EngineUnreachable("the engine failed", why=f"{type(error).__name__}: {error}") from error


def tag_of(directory: Path) -> str:
    """What tells the hires of a coordinator from those of all others; made once and kept in its directory.

    The name of the directory is not enough: others may be called the same, and it may be no word for a shell or Slurm.
    """
    path = directory / TAG
    if not path.exists():
        name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-")[:24] or "coordinator"
        part = path.with_suffix(".part")
        part.write_text(f"{name}-{secrets.token_hex(3)}\n", "ascii")
        part.replace(path)
    return path.read_text("ascii").strip()


def _told(error: ShoalError) -> tuple[str, str, str]:
    """What is wrong, where, and what to do."""
    return f"{error.what}: {error.why}" if error.why else error.what, error.where, error.do
