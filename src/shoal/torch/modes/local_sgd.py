"""Local training (``--sync local:H``): members train for themselves for a round, and then average what they learned.

To the session a round is what a step is: it is exchanged, committed and done again as a whole. A member trains on its
share of the round in batches of an equal part of the global batch each, with the script's own optimizer; the faster it
is, the more of them it gets. See docs/synchrony-local.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shoal.core.sync_mode import SyncMode
from shoal.errors import UnsupportedWithLocalSgd, UnusableBackward
from shoal.torch.gradients.guards import outside
from shoal.torch.modes.every_step import TorchTrainer
from shoal.torch.modes.outer_optimizer import OuterOptimizer, ParameterDeltas, RoundStart
from shoal.worker.data.round_feed import LocalBatch, RoundFeed
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.step import Step
from shoal.worker.training.training_state import TrainingState
from shoal.worker.transport.exchange_broken import ExchangeBroken


@dataclass(slots=True)
class _LocalStep:
    """The batch of a round that the loop's body is at."""

    turn: Step
    number: int
    lot: LocalBatch
    weight: float = 0.0
    whole: bool = False
    applied: bool = False


class TorchLocalTrainer(TorchTrainer):
    """A trainer whose optimizers step for themselves, and whose steps are rounds."""

    feed: RoundFeed | None

    def __init__(self, session: Session | StandaloneSession, keeper: TrainingState, sync: SyncMode) -> None:
        super().__init__(session, keeper)
        # Gradients are never summed over members, so there is nothing to compare.
        self.soundings.every = 0
        self.length = sync.local
        self._outer = OuterOptimizer(session.settings.outer_lr, session.settings.outer_momentum)
        self._start = RoundStart()
        self._kept_for: Step | None = None
        self._batch: _LocalStep | None = None
        self._calls: list[int] = []
        self._every: list[bool] = []
        self._ahead = 0
        keeper.parts["local"] = self

    def state_dict(self) -> dict[str, Any]:
        """What joiners and checkpoints need besides the script's own objects."""
        return {"velocities": self._outer.velocities, "every": self._every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._outer.velocities, self._every = list(state["velocities"]), list(state["every"])

    # --- one batch of a round

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        turn = self.turn
        if turn is not None and not turn.spoiled:
            self._at(turn)
        super().backward(loss, weight)

    def _at(self, turn: Step) -> None:
        """Notice that another batch has begun."""
        assert self.feed is not None
        before = self._batch if self._batch is not None and self._batch.turn is turn else None
        if before is not None and turn.piece <= before.lot.last:
            return
        number = before.number + 1 if before is not None else 0
        if before is None:
            self._calls = [0] * len(self.schedulers)
        elif not before.applied and not self._session.broken:
            raise UnusableBackward(
                f"batch {before.number} of round {turn.step} ended without optimizer.step",
                do="call optimizer.step() every time",
            )
        self._batch = _LocalStep(turn, number, self.feed.local_batches[number])
        self._gathered.begin()
        turn.nominal = self._batch.lot.samples or 1
        turn.stepped.clear()

    def _go_back(self, turn: Step, scaled: torch.Tensor) -> None:
        batch, pace = self._batch, self._pace
        assert batch is not None
        assert self._buckets is not None
        parameters = self._buckets.parameters
        self._gathered.lend(parameters)
        if turn.own:
            scaled.backward()  # type: ignore[no-untyped-call]
            batch.weight += turn.own
        batch.whole = turn.piece == batch.lot.last
        if not batch.whole:
            self._gathered.take_back(parameters)
            return
        if batch.weight and batch.weight != turn.nominal:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(batch.weight / turn.nominal)
        if pace is not None:
            pace.before_exchange(batch.lot.samples, turn.pieces[turn.piece].samples)
            pace.after_backward()
            pace.begin(turn.step)

    def _bucket_up(self) -> None:
        assert self.model is not None
        assert self._statistics is not None
        parameters = list(self.model.parameters())
        if self._buckets is None or not self._buckets.fits(parameters):
            self._buckets = ParameterDeltas(parameters, self._statistics.count, told=1 + len(self.schedulers))

    # --- what guards ask

    @property
    def _now(self) -> _LocalStep | None:
        """The batch that the loop's body is at, if it counts so far."""
        batch = self._batch
        if batch is None or batch.turn is not self.turn or self._session.broken or batch.turn.spoiled:
            return None
        return batch

    @property
    def applied(self) -> bool:
        return self._now is not None and self._now.applied and not self._now.turn.empty

    @property
    def has_gradient(self) -> bool:
        return self._now is not None and self._now.whole and not self._now.turn.empty

    @property
    def accumulating(self) -> bool:
        batch = self._now
        return batch is not None and not batch.applied

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        if self._nested:
            return real()
        turn = self.turn
        if turn is None:
            return outside(optimizer)
        if self._outside(turn):
            return None
        result = self._step_locally(turn, real)
        self._stepped(turn, optimizer)
        return result

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        turn = self.turn
        if turn is None or self._outside(turn):
            return None
        self._nested = True
        try:
            result = self._step_locally(turn, real)
        finally:
            self._nested = False
        self._stepped(turn, optimizer)
        return result

    def _outside(self, turn: Step) -> bool:
        if self._session.broken or turn.spoiled:
            return True
        batch = self._now
        if turn.backwards <= turn.piece or batch is None:
            raise UnusableBackward("optimizer.step came before run.backward", do="call run.backward(loss) first")
        if batch.applied:
            raise UnusableBackward("optimizer.step was called twice for one batch", do="call it once for each batch")
        return not batch.whole

    def _step_locally(self, turn: Step, real: Callable[[], Any]) -> Any:
        self._keep(turn)
        return None if turn.empty else real()

    def _keep(self, turn: Step) -> None:
        """Before the first change of a round: copy what the round began with."""
        if self._kept_for is turn:
            return
        assert self._buckets is not None
        self._keeper.before_change()
        self._session.before_change()
        scaler = self._keeper.parts.get("scaler")
        others = [*self.schedulers, *([scaler] if scaler is not None else [])]
        self._start.keep(self._buckets.parameters, self.optimizers, others)
        self._kept_for = turn

    def _stepped(self, turn: Step, optimizer: torch.optim.Optimizer) -> None:
        turn.stepped.add(id(optimizer))
        if len(turn.stepped) < len(self.optimizers):
            return
        assert self._batch is not None
        self._batch.applied = True
        if turn.last_piece:
            self._end_round(turn)

    def _rate(self) -> float:
        """Each member is at a batch of its own."""
        return 0.0

    def _lacks_step(self, turn: Step) -> bool:  # noqa: ARG002
        return True

    # --- the end of a round

    def _end_round(self, turn: Step) -> None:
        assert isinstance(self._buckets, ParameterDeltas)
        assert self.feed is not None
        turn.data_s += self.feed.read_s
        turn.compute_s = time.perf_counter() - turn.given_at - self.feed.read_s
        self._session.set_phase("exchange")
        turn.sending = True
        try:
            self._average(turn, self._buckets)
        except ExchangeBroken as broken:
            self._session.fail(broken)
            return
        every = self._every_batch(self._buckets)
        if not self._may_apply():
            return
        self._outer.step(self._buckets, self._start.values)
        self._every = every
        self._commit(turn)
        self._catch_up(turn)

    def _average(self, turn: Step, changes: ParameterDeltas) -> None:
        assert self._statistics is not None
        began = time.perf_counter()
        total = self._receive_pulses(turn, self._send_pulse(turn))
        part = turn.weight / total if total else 0.0
        self._statistics.send(changes, part)
        before_last = [0, *[0] * len(self._calls)] if turn.empty else [self._number(turn), *self._calls]
        changes.told.copy_(torch.tensor(before_last))
        changes.sum_up(turn.exchange, self._start.values, part)
        turn.wait_s = time.perf_counter() - began
        turn.reduced = True

    def _number(self, turn: Step) -> int:
        assert self._batch is not None
        assert self._batch.turn is turn
        return self._batch.number

    def _undo_uncommitted(self) -> None:
        turn = self.turn
        if turn is not None and not turn.committed and self._kept_for is turn:
            self._start.put_back()
        self._kept_for = None
        super()._undo_uncommitted()

    # --- schedules: a round counts for as many steps as it has global batches, whoever does how many of its own

    def schedules(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:
        if self._ahead:
            return self._ahead
        if self.turn is None:
            return 1
        batch = self._now
        if batch is None or not batch.applied:
            return 0
        if batch.turn.committed:
            return 1
        if args or kwargs:
            return 0
        which = next(i for i, known in enumerate(self.schedulers) if known is scheduler)
        self._calls[which] += 1
        assert self.feed is not None
        step = batch.turn.step
        return self.feed.global_batches_due(step, batch.number + 1) - self.feed.global_batches_due(step, batch.number)

    def _every_batch(self, changes: ParameterDeltas) -> list[bool]:
        """Which schedulers are stepped after every batch, by what all members tell of all but their last one."""
        batches, *calls = (int(number) for number in changes.told.tolist())
        if not batches:
            return self._every or [False] * len(calls)
        if any(count not in (0, batches) for count in calls):
            raise UnsupportedWithLocalSgd(
                "a scheduler was stepped after some batches of a round and not after others",
                why="members have different numbers of batches, and their schedules would no longer be the same",
                do="step it after every batch, or only if run.committed or run.epoch_ended",
            )
        return [count == batches for count in calls]

    def _catch_up(self, turn: Step) -> None:
        """Bring schedules to where they are one step before the end of the round; that one, the script does."""
        assert self.feed is not None
        steps = self.feed.global_batches_in(turn.step)
        for scheduler, every, calls in zip(self.schedulers, self._every, self._calls, strict=True):
            done = self.feed.global_batches_due(turn.step, len(self.feed.local_batches) - 1) if calls else 0
            self._ahead = steps - 1 - done if every else 0
            if self._ahead:
                scheduler.step()
            self._ahead = 0
