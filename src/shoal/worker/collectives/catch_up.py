"""Exchange of a joiner that takes part in steps before it has the state, so that the other ranks need not wait for it.

While the state of the world's first step is on its way, a thread adds zeros to every exchange of the world and keeps
the results. When the state has arrived, the joiner repeats those steps by itself with the kept results: each costs it
little more than an optimizer step. As soon as it waits for a step that the others have not begun to exchange, it has
caught up: it does that step itself, still with weight 0, and has a share from the next one on.

Where a step without a share takes as long as one with it, the joiner would stay a moment behind for ever. So when it is
about to finish the very step that the others begin to exchange, the thread reports that it is no longer catching up,
and the next step waits for that moment.
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
"""One buffer of a step's exchange, its adder, and an empty contribution if it is a sum over shards."""

MAX_KEPT_STEPS = 32
POLL_S = 0.002
# The part of a step that the others may be made to wait, once, for a joiner that has nearly caught up.
MAX_DELAY = 0.25


class CatchUpExchange:
    """An exchange that replays the steps its owner missed, and then passes everything to the real one.

    `zero_buffers` are the buffers of one step, in order. `is_last_step(reports)` returns whether no step follows.
    """

    def __init__(
        self,
        real: Ring,
        zero_buffers: Sequence[ZeroBuffer],
        is_last_step: Callable[[tuple[StepReport, ...]], bool],
    ) -> None:
        self.rank, self.size = real.rank, real.size
        self._real, self._zero_buffers, self._is_last_step = real, list(zero_buffers), is_last_step
        self._kept: deque[tuple[NDArray[np.float64], list[NDArray[Any]]]] = deque()
        self._replaying: deque[NDArray[Any]] = deque()
        self._owner_waits = False
        self._ended = False
        self._exchanged_at = self._step_began_at = time.monotonic()
        self._own_step_s: float | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, name="shoal-catch-up", daemon=True).start()

    @property
    def following(self) -> bool:
        """Whether the thread still takes part in the owner's place."""
        return not self._ended

    @property
    def broken(self) -> ExchangeBroken | None:
        """The reason why nothing more can be exchanged, None while the exchange works."""
        broken: ExchangeBroken | None = getattr(self._real, "broken", None)
        return broken

    def gather(self, record: NDArray[np.float64]) -> GatherWork:
        """Return the kept reports of the owner's next step, or gather for real once it has caught up."""
        with self._changed:
            self._owner_waits, self._own_step_s = True, time.monotonic() - self._step_began_at
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._kept or self._ended)
            self._owner_waits = False
            if not self._kept:
                return self._real.gather(record)
            reports, buffers = self._kept.popleft()
            self._step_began_at = time.monotonic()
            self._replaying.extend(buffers)
            self._changed.notify_all()
            return _ReplayedWork(reports)

    def reduce(self, buffer: NDArray[Any], add: Adder | None = None, part: TreePartials | None = None) -> Work:
        """Copy the kept sum of the replayed step into the buffer, or reduce for real once the owner has caught up."""
        if not self._replaying:
            return self._real.reduce(buffer, add, part)
        np.copyto(buffer, self._replaying.popleft())
        return _ReplayedWork(np.empty((0, 0)))

    def barrier(self) -> None:
        self._real.barrier()

    def abort(self, cause: str) -> None:
        self._real.abort(cause)

    def close(self) -> None:
        self._real.close()

    def _follow(self) -> None:
        try:
            while self._exchange_zeros():
                pass
        except ExchangeBroken:
            pass  # the owner meets it in the real exchange, after it has replayed what was kept
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _exchange_zeros(self) -> bool:
        """Take part in one step with zeros; return False if the owner does this or the next, or it was the last."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._kept) < MAX_KEPT_STEPS)
        if self._owner_has_caught_up():
            return False
        follows = self._owner_nearly_caught_up()
        gathering = self._real.gather(encode(StepReport(step=-1, flags=0 if follows else CATCHING_UP)))
        # New buffers for every step: the sums are kept, and zeros cost less than a copy.
        buffers = [np.zeros_like(zeros) for zeros, _, _ in self._zero_buffers]
        works = [
            self._real.reduce(buffer, add, part)
            for buffer, (_, add, part) in zip(buffers, self._zero_buffers, strict=True)
        ]
        reports = gathering.result()
        for work in works:
            work.wait()
        with self._changed:
            self._kept.append((reports, buffers))
            self._exchanged_at = time.monotonic()
            self._changed.notify_all()
        return not follows and not self._is_last_step(decode(reports))

    def _owner_has_caught_up(self) -> bool:
        """Block until the owner waits for the next step (True) or the others begin to exchange it (False)."""
        while True:
            with self._changed:
                if self._owner_waits and not self._kept:
                    return True
            if self._real.has_incoming(POLL_S):
                return False

    def _owner_nearly_caught_up(self) -> bool:
        """Return whether the owner is about to finish the very step that the others begin to exchange."""
        with self._changed:
            now = time.monotonic()
            if self._kept or self._own_step_s is None:
                return False
            return is_nearly_done(now - self._step_began_at, self._own_step_s, now - self._exchanged_at)


def is_nearly_done(elapsed_s: float, own_step_s: float, step_s: float) -> bool:
    """Return whether a step of `own_step_s` that began `elapsed_s` ago delays steps of `step_s` only a little."""
    return own_step_s - elapsed_s <= MAX_DELAY * step_s


class _ReplayedWork:
    """An operation that was complete before it was submitted."""

    def __init__(self, reports: NDArray[np.float64]) -> None:
        self._reports = reports

    def wait(self) -> None:
        """Return at once."""

    def result(self) -> NDArray[np.float64]:
        return self._reports
