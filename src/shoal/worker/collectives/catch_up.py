"""How a newcomer takes part in steps for which it has no state yet, so that nobody waits for it.

A shadow adds zeros to every exchange of its world and keeps what comes out. Meanwhile the state of the world's first
step arrives, and the newcomer does those steps over again by itself, with the results that the shadow kept: each costs
it hardly more than an optimizer step. As soon as it waits for a step that the others have not begun to exchange, it has
caught up: it does that one itself, still without a share, and from the next one on it has its own. Where a step without
a share takes as long as one with it, the newcomer would stay a moment behind for ever: if it is known to be about to
finish the step that the others exchange, its shadow says so, and the next step waits for that moment.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.core.step_report import CATCHING_UP, StepReport, decode, encode
from shoal.worker.collectives.exchange import Adder, GatherWork, TreePartials, Work
from shoal.worker.collectives.ring import Ring
from shoal.worker.transport.exchange_broken import ExchangeBroken

ZeroBuffer: TypeAlias = tuple[NDArray[Any], Adder | None, TreePartials | None]
"""One buffer of a step's exchange, how it is added up, and our part of it if it is a sum over shards."""

KEPT_STEPS = 32
LOOK_AGAIN_S = 0.002
# The part of a step that the others may be made to wait once, for a newcomer that is nearly there.
LATE = 0.25


class CatchUpExchange:
    """An exchange that plays back what happened before its owner could take part, and then is the real one.

    `zero_buffers` are the buffers of one step, in order. `is_last_step(reports)` tells whether no step follows.
    """

    def __init__(
        self, real: Ring, zero_buffers: Sequence[ZeroBuffer], is_last_step: Callable[[tuple[StepReport, ...]], bool]
    ) -> None:
        self.rank, self.size = real.rank, real.size
        self._real, self._zero_buffers, self._is_last_step = real, list(zero_buffers), is_last_step
        self._kept: deque[tuple[NDArray[np.float64], list[NDArray[Any]]]] = deque()
        self._playing: deque[NDArray[Any]] = deque()
        self._awaited = False
        self._over = False
        self._exchanged_at = self._worked_from = time.monotonic()
        self._own_s: float | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, name="shoal-shadow", daemon=True).start()

    @property
    def following(self) -> bool:
        """Whether the shadow still takes part in our stead."""
        return not self._over

    @property
    def broken(self) -> ExchangeBroken | None:
        found: ExchangeBroken | None = getattr(self._real, "broken", None)
        return found

    def gather(self, record: NDArray[np.float64]) -> GatherWork:
        with self._changed:
            self._awaited, self._own_s = True, time.monotonic() - self._worked_from
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._kept or self._over)
            self._awaited = False
            if not self._kept:
                return self._real.gather(record)
            pulses, buffers = self._kept.popleft()
            self._worked_from = time.monotonic()
            self._playing.extend(buffers)
            self._changed.notify_all()
            return _ReplayedWork(pulses)

    def reduce(self, buffer: NDArray[Any], add: Adder | None = None, part: TreePartials | None = None) -> Work:
        if not self._playing:
            return self._real.reduce(buffer, add, part)
        np.copyto(buffer, self._playing.popleft())
        return _ReplayedWork(np.empty((0, 0)))

    def barrier(self) -> None:
        self._real.barrier()

    def abort(self, cause: str) -> None:
        self._real.abort(cause)

    def close(self) -> None:
        self._real.close()

    def _follow(self) -> None:
        try:
            while self._one_step():
                pass
        except ExchangeBroken:
            pass  # the owner meets it in the real exchange, when it has played back what was kept
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _one_step(self) -> bool:
        """Take part in one step with zeros; False if the owner does it or the next one, or if it was the last."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._kept) < KEPT_STEPS)
        if self._owner_is_first():
            return False
        follows = self._owner_follows()
        gathered = self._real.gather(encode(StepReport(step=-1, flags=0 if follows else CATCHING_UP)))
        # Fresh ones for every step: what comes out is kept, and zeros cost less than a copy.
        buffers = [np.zeros_like(blank) for blank, _, _ in self._zero_buffers]
        tickets = [
            self._real.reduce(b, add, part) for b, (_, add, part) in zip(buffers, self._zero_buffers, strict=True)
        ]
        pulses = gathered.result()
        for ticket in tickets:
            ticket.wait()
        with self._changed:
            self._kept.append((pulses, buffers))
            self._exchanged_at = time.monotonic()
            self._changed.notify_all()
        return not follows and not self._is_last_step(decode(pulses))

    def _owner_is_first(self) -> bool:
        """Wait until the owner has caught up, or the others begin to exchange the next step: who was first."""
        while True:
            with self._changed:
                if self._awaited and not self._kept:
                    return True
            if self._real.stirs(LOOK_AGAIN_S):
                return False

    def _owner_follows(self) -> bool:
        """Whether the owner is at the step that the others begin to exchange, and about to finish it."""
        with self._changed:
            now = time.monotonic()
            if self._kept or self._own_s is None:
                return False
            return is_nearly_there(now - self._worked_from, self._own_s, now - self._exchanged_at)


def is_nearly_there(worked_s: float, own_s: float, step_s: float) -> bool:
    """Whether who needs `own_s` for a step, and has worked at it so long, holds up steps of `step_s` only a little."""
    return own_s - worked_s <= LATE * step_s


class _ReplayedWork:
    """An operation that was over before it was asked for."""

    def __init__(self, pulses: NDArray[np.float64]) -> None:
        self._pulses = pulses

    def wait(self) -> None:
        """It is done."""

    def result(self) -> NDArray[np.float64]:
        return self._pulses
