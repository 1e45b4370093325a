"""One thread for each pool, which asks its engine for one kind of thing at a time.

So what an engine says of its hires never contradicts what it was asked before. Machines that are hired one right after
the other are asked for together, and so are those that are let go: with many hosts, each would wait for all before it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from shoal.core.provisioning import events as se
from shoal.engines.engine import AllocationRequest, AllocationStatus, Engine
from shoal.errors import AllocationRefused, EngineUnreachable, ShoalError

LOOK_S = 1.0
CALM_LOOK_S = 5.0
AT_ONCE = 16
TIDY_FIRST_S = 30.0
TIDY_S = 900.0

Ends = tuple[tuple[str, float], ...]

log = logging.getLogger("shoal.hiring")


class PoolWorker(threading.Thread):
    """Where one pool is asked. `asking` are those whose submission has not been heard of, `known` all that it has.

    `done` counts what its engine has done. `all_ended` says after its end that none of its hires is left.
    """

    def __init__(
        self,
        pool: str,
        tag: str,
        engine: Engine,
        ask_of: Callable[[se.SubmitAllocation], AllocationRequest],
        said: Callable[[se.Event], None],
        ends: Callable[[Ends], None],
    ) -> None:
        super().__init__(name=f"shoal-pool-{pool}", daemon=True)
        self._pool, self._engine, self._ask_of, self._said, self._ends = pool, engine, ask_of, said, ends
        self._tag = tag
        self._line: queue.Queue[se.SubmitAllocation | se.CancelAllocation | None] = queue.Queue()
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
        return self._engine.cancel_timeout_s(grace_s) * max(1, math.ceil(self.left / AT_ONCE))

    def put(self, instruction: se.SubmitAllocation | se.CancelAllocation) -> None:
        if isinstance(instruction, se.SubmitAllocation):
            self.asking.add(instruction.allocation)
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

    def _waiting(self) -> list[se.SubmitAllocation | se.CancelAllocation | None]:
        """What was asked for meanwhile."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._line.get_nowait())
        return found

    def _do_all(self, group: Sequence[se.SubmitAllocation | se.CancelAllocation]) -> None:
        if len(group) == 1:
            self._do(group[0])
            return
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for one in as_completed([threads.submit(self._do, asked) for asked in group]):
                one.result()
                self.done += 1

    def _do(self, asked: se.SubmitAllocation | se.CancelAllocation) -> None:
        try:
            with _blamed():
                if isinstance(asked, se.SubmitAllocation):
                    self._submit(asked)
                elif asked.handle:
                    self._engine.cancel(asked.handle)
                    self._said(se.AllocationEnded(asked.allocation))
        except EngineUnreachable as error:
            # What is to end is asked again by the supply; what is to begin, when the pool can be reached.
            self._said(se.PoolUnreachable(self._pool, *_told(error)))
            if isinstance(asked, se.SubmitAllocation):
                self._said(se.AllocationRejected(self._pool, asked.allocation, *_told(error)))
        except ShoalError as error:
            log.warning("pool %s: %s", self._pool, error)
            if isinstance(asked, se.SubmitAllocation):
                final = isinstance(error, AllocationRefused)
                self._said(se.AllocationRejected(self._pool, asked.allocation, *_told(error), final=final))

    def _submit(self, asked: se.SubmitAllocation) -> None:
        try:
            handle = self._engine.submit(self._ask_of(asked))
        except OSError as error:
            raise AllocationRefused("the engine could not be asked", why=str(error)) from error
        self._said(se.AllocationSubmitted(self._pool, asked.allocation, handle))

    def _look(self) -> None:
        try:
            with _blamed():
                found = self._engine.watch(self._tag)
        except ShoalError as error:
            final = isinstance(error, AllocationRefused)
            self._said(se.PoolUnreachable(self._pool, *_told(error), final=final))
            return
        # Two pools may be of one cluster: each looks after its own.
        mine = [
            one for one in sorted(found, key=lambda one: one.allocation) if se.pool_of(one.allocation) == self._pool
        ]
        seen = tuple(
            se.ListedAllocation(one.allocation, one.handle, one.state == "running", one.why)
            for one in mine
            if one.state != "gone"
        )
        self._said(
            se.PoolListed(self._pool, seen, tuple((one.allocation, one.why) for one in mine if one.state == "gone"))
        )
        self._ends(
            tuple((one.allocation, one.ends_at) for one in mine if one.ends_at is not None and one.state == "running")
        )

    def _tidy(self) -> None:
        """What was left by hires that are gone is nobody's worry but the disk's."""
        try:
            with _blamed():
                self._engine.clean_up(self._tag, self.known or ())
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
        mine = [one for one in found if se.pool_of(one.allocation) == self._pool]
        self._ending = len(mine)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            ends = [threads.submit(self._end, one) for one in mine]
            for _ in as_completed(ends):
                self._ending, self.done = self._ending - 1, self.done + 1
        self.all_ended = all(one.result() for one in ends)

    def _end(self, one: AllocationStatus) -> bool:
        try:
            with _blamed():
                self._engine.cancel(one.handle)
        except ShoalError as error:
            if one.state != "gone":
                log.error("%s of pool %s may be left of this coordinator: %s", one.handle, self._pool, error)
                return False
        return True


def together(
    asked: Iterable[se.SubmitAllocation | se.CancelAllocation | None],
) -> list[list[se.SubmitAllocation | se.CancelAllocation]]:
    """What can be asked at the same time: what is of one kind and in a row; None asks for nothing."""
    real = [one for one in asked if one is not None]
    return [list(group) for _, group in itertools.groupby(real, key=type)]


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


def _told(error: ShoalError) -> tuple[str, str, str]:
    """What is wrong, where, and what to do."""
    return f"{error.what}: {error.why}" if error.why else error.what, error.where, error.do
