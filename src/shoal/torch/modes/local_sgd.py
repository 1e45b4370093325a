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

    current: Step
    number: int
    lot: LocalBatch
    weight: float = 0.0
    whole: bool = False
    applied: bool = False


class TorchLocalTrainer(TorchTrainer):
    """A trainer whose optimizers step for themselves, and whose steps are rounds."""

    feed: RoundFeed | None

    def __init__(self, session: Session | StandaloneSession, training_state: TrainingState, sync: SyncMode) -> None:
        super().__init__(session, training_state)
        # Gradients are never summed over members, so there is nothing to compare.
        self.noise_sampler.every_steps = 0
        self.length = sync.local
        self._outer = OuterOptimizer(session.settings.outer_lr, session.settings.outer_momentum)
        self._start = RoundStart()
        self._kept_for: Step | None = None
        self._batch: _LocalStep | None = None
        self._calls: list[int] = []
        self._every: list[bool] = []
        self._ahead = 0
        training_state.parts["local"] = self

    def state_dict(self) -> dict[str, Any]:
        """What joiners and checkpoints need besides the script's own objects."""
        return {"velocities": self._outer.velocities, "every": self._every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._outer.velocities, self._every = list(state["velocities"]), list(state["every"])

    # --- one batch of a round

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        current = self.current
        if current is not None and not current.discarded:
            self._at(current)
        super().backward(loss, weight)

    def _at(self, current: Step) -> None:
        """Notice that another batch has begun."""
        assert self.feed is not None
        before = self._batch if self._batch is not None and self._batch.current is current else None
        if before is not None and current.index <= before.lot.last:
            return
        number = before.number + 1 if before is not None else 0
        if before is None:
            self._calls = [0] * len(self.schedulers)
        elif not before.applied and not self._session.broken:
            raise UnusableBackward(
                f"batch {before.number} of round {current.number} ended without optimizer.step",
                do="call optimizer.step() every time",
            )
        self._batch = _LocalStep(current, number, self.feed.local_batches[number])
        self._gathered.begin()
        current.global_batch_size = self._batch.lot.samples or 1
        current.stepped.clear()

    def _go_back(self, current: Step, scaled: torch.Tensor) -> None:
        batch, pace = self._batch, self._slowdown
        assert batch is not None
        assert self._buckets is not None
        parameters = self._buckets.parameters
        self._gathered.lend(parameters)
        if current.micro_batch_weight:
            scaled.backward()  # type: ignore[no-untyped-call]
            batch.weight += current.micro_batch_weight
        batch.whole = current.index == batch.lot.last
        if not batch.whole:
            self._gathered.take_back(parameters)
            return
        if batch.weight and batch.weight != current.global_batch_size:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(batch.weight / current.global_batch_size)
        if pace is not None:
            pace.before_exchange(batch.lot.samples, current.micro_batches[current.index].samples)
            pace.after_backward()
            pace.begin(current.number)

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
        if batch is None or batch.current is not self.current or self._session.broken or batch.current.discarded:
            return None
        return batch

    @property
    def applied(self) -> bool:
        return self._now is not None and self._now.applied and not self._now.current.empty

    @property
    def has_gradient(self) -> bool:
        return self._now is not None and self._now.whole and not self._now.current.empty

    @property
    def accumulating(self) -> bool:
        batch = self._now
        return batch is not None and not batch.applied

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        if self._nested:
            return real()
        current = self.current
        if current is None:
            return outside(optimizer)
        if self._outside(current):
            return None
        result = self._step_locally(current, real)
        self._stepped(current, optimizer)
        return result

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        current = self.current
        if current is None or self._outside(current):
            return None
        self._nested = True
        try:
            result = self._step_locally(current, real)
        finally:
            self._nested = False
        self._stepped(current, optimizer)
        return result

    def _outside(self, current: Step) -> bool:
        if self._session.broken or current.discarded:
            return True
        batch = self._now
        if current.backwards <= current.index or batch is None:
            raise UnusableBackward("optimizer.step came before run.backward", do="call run.backward(loss) first")
        if batch.applied:
            raise UnusableBackward("optimizer.step was called twice for one batch", do="call it once for each batch")
        return not batch.whole

    def _step_locally(self, current: Step, real: Callable[[], Any]) -> Any:
        self._keep(current)
        return None if current.empty else real()

    def _keep(self, current: Step) -> None:
        """Before the first change of a round: copy what the round began with."""
        if self._kept_for is current:
            return
        assert self._buckets is not None
        self._training_state.before_change()
        self._session.before_change()
        scaler = self._training_state.parts.get("scaler")
        others = [*self.schedulers, *([scaler] if scaler is not None else [])]
        self._start.keep(self._buckets.parameters, self.optimizers, others)
        self._kept_for = current

    def _stepped(self, current: Step, optimizer: torch.optim.Optimizer) -> None:
        current.stepped.add(id(optimizer))
        if len(current.stepped) < len(self.optimizers):
            return
        assert self._batch is not None
        self._batch.applied = True
        if current.on_last_micro_batch:
            self._end_round(current)

    def _rate(self) -> float:
        """Each member is at a batch of its own."""
        return 0.0

    def _lacks_step(self, current: Step) -> bool:  # noqa: ARG002
        return True

    # --- the end of a round

    def _end_round(self, current: Step) -> None:
        assert isinstance(self._buckets, ParameterDeltas)
        assert self.feed is not None
        current.data_s += self.feed.read_s
        current.compute_s = time.perf_counter() - current.started_at - self.feed.read_s
        self._session.set_phase("exchange")
        current.sending = True
        try:
            self._average(current, self._buckets)
        except ExchangeBroken as broken:
            self._session.fail(broken)
            return
        every = self._every_batch(self._buckets)
        if not self._begin_commit():
            return
        self._outer.step(self._buckets, self._start.values)
        self._every = every
        self._commit(current)
        self._catch_up(current)

    def _average(self, current: Step, changes: ParameterDeltas) -> None:
        assert self._statistics is not None
        began = time.perf_counter()
        total = self._receive_reports(current, self._send_report(current))
        part = current.weight / total if total else 0.0
        self._statistics.send(changes, part)
        before_last = [0, *[0] * len(self._calls)] if current.empty else [self._number(current), *self._calls]
        changes.told.copy_(torch.tensor(before_last))
        changes.sum_up(current.exchange, self._start.values, part)
        current.wait_s = time.perf_counter() - began
        current.reduced = True

    def _number(self, current: Step) -> int:
        assert self._batch is not None
        assert self._batch.current is current
        return self._batch.number

    def _undo_uncommitted(self) -> None:
        current = self.current
        if current is not None and not current.committed and self._kept_for is current:
            self._start.put_back()
        self._kept_for = None
        super()._undo_uncommitted()

    # --- schedules: a round counts for as many steps as it has global batches, whoever does how many of its own

    def schedules(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:
        if self._ahead:
            return self._ahead
        if self.current is None:
            return 1
        batch = self._now
        if batch is None or not batch.applied:
            return 0
        if batch.current.committed:
            return 1
        if args or kwargs:
            return 0
        which = next(i for i, known in enumerate(self.schedulers) if known is scheduler)
        self._calls[which] += 1
        assert self.feed is not None
        step = batch.current.number
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

    def _catch_up(self, current: Step) -> None:
        """Bring schedules to where they are one step before the end of the round; that one, the script does."""
        assert self.feed is not None
        steps = self.feed.global_batches_in(current.number)
        for scheduler, every, calls in zip(self.schedulers, self._every, self._calls, strict=True):
            done = self.feed.global_batches_due(current.number, len(self.feed.local_batches) - 1) if calls else 0
            self._ahead = steps - 1 - done if every else 0
            if self._ahead:
                scheduler.step()
            self._ahead = 0
