"""Training loop of Keras models in the sync mode `local:H`: every call of the train function is one round of the run.

In a round a member trains on its share, local batch by local batch, with the model's own optimizer; then the changes of
all members are averaged and the outer optimizer applies them. `shoal.torch.modes.local_sgd` and docs/synchrony-local.md
explain the method. This module differs from `every_step` in three places: gradients are summed over the micro-batches
of one local batch only and applied at once; the exchange carries the changes of the variables since the round's start;
and an uncommitted round is undone from copies of all that it changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.core import sync_mode
from shoal.core.state_check import TensorDigest
from shoal.errors import UnsupportedWithLocalSgd
from shoal.keras.backends.base import Arrays, KerasBackend, Logs, TrainStepResult
from shoal.keras.modes.every_step import KerasLoopTrainer, KerasTrainer
from shoal.keras.modes.outer_optimizer import KerasOuterOptimizer, KerasRoundStart
from shoal.keras.modes.state import VariableGroup
from shoal.worker.collectives.flat_buffers import ArraySpec, FlatBuffers
from shoal.worker.data.round_feed import RoundFeed
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.step import Step
from shoal.worker.training.training_state import TrainingState


class KerasLocalTrainer(KerasTrainer):
    """Trainer that steps its optimizer without the other members, and averages with them after every round."""

    feed: RoundFeed | None

    def __init__(
        self, session: Session | StandaloneSession, training_state: TrainingState, backend: KerasBackend
    ) -> None:
        super().__init__(session, training_state, backend)
        settings = session.settings
        self.round_length = sync_mode.parse(settings.sync).local
        # Gradients are not summed over members, so their norms cannot be compared.
        self.noise_sampler.every_steps = 0
        self._inner_optimizer = getattr(backend.optimizer, "inner_optimizer", backend.optimizer)
        for option in ("use_ema", "gradient_accumulation_steps"):
            if getattr(self._inner_optimizer, option):
                self.refuse(f"an optimizer with {option}", "leave it out, or train with --sync step")
        self._trained: list[Any] = backend.model.trainable_variables
        self._outer = KerasOuterOptimizer(settings.outer_lr, settings.outer_momentum, self._trained)
        if self._outer.velocities:
            training_state.parts["outer"] = VariableGroup(
                lambda: self._outer.velocities, lambda velocity: velocity.value
            )
        self._round_start = KerasRoundStart(backend.read)
        self._recorded_round: Step | None = None
        self._start_iterations = 0
        self._local_sums: FlatBuffers | None = None

    def refuse(self, what: str, do: str) -> None:
        """Raise UnsupportedWithLocalSgd."""
        raise UnsupportedWithLocalSgd(f"{what} cannot be used with --sync local:{self.round_length}", do=do)

    # --- one local batch

    def _sum_gradients(self, current: Step, gradients: Arrays, statistics: Arrays, metrics: Arrays) -> Arrays | None:
        """Add the gradients of a micro-batch; return those of the local batch once they are complete and not empty."""
        assert self.feed is not None
        self._count_micro_batch(current, statistics, metrics)
        if self._session.broken:
            return None
        number = bisect_left(self.feed.local_batches, current.index, key=lambda batch: batch.last)
        local_batch = self.feed.local_batches[number]
        if self._local_sums is None or len(self._local_sums.views) != len(gradients):
            self._local_sums = FlatBuffers([ArraySpec(array.shape, array.dtype) for array in gradients], tail=0)
        scale = current.micro_batch_weight / (local_batch.samples or 1)
        self._local_sums.load(gradients, scale, add=current.index > local_batch.first)
        if current.index < local_batch.last:
            return None
        self._emulate_slowdown(local_batch.samples, current.micro_batches[current.index].samples)
        if self._slowdown is not None:
            self._slowdown.begin(current.number)
        self._record_round_start(current)
        if current.empty:
            return None
        # Learning rate schedules count the global batches due so far, not this member's own steps.
        due = self.feed.global_batches_due(current.number, number)
        self._inner_optimizer._iterations.assign(self._start_iterations + due)
        return self._local_sums.views

    def _record_round_start(self, current: Step) -> None:
        """Copy all that the round changes, before its first change."""
        if self._recorded_round is current:
            return
        self._training_state.before_change()
        self._session.before_change()
        self._round_start.record([*self._trained, *self._backend.optimizer.variables])
        self._start_iterations = int(self._backend.read(self._inner_optimizer._iterations))
        self._recorded_round = current

    def _apply_sums(self, current: Step, sums: Arrays | None, result: TrainStepResult) -> Logs | None:
        if sums is not None:
            self._backend.apply(sums, result.statistics, result.metrics_after)
        self._end_local_batch(current)
        return self._backend.metric_results() if current.committed else None

    def _tensor_digests(self) -> Iterator[TensorDigest]:
        """Yield those of the model: the state of the optimizer is each member's own."""
        return (tensor for tensor in super()._tensor_digests() if tensor.kind != "optimizer")

    # --- the end of a round

    def _end_local_batch(self, current: Step) -> None:
        """After the last local batch, average with all members, apply the outer step and commit the round."""
        if (
            not current.on_last_micro_batch
            or self._session.broken
            or not self._average(current)
            or not self._begin_commit()
        ):
            return
        assert self._sums is not None
        assert self.feed is not None
        self._adopt_tail(current)
        start = self._round_start.values[: len(self._trained)]
        for variable, value in zip(self._trained, self._outer.step(self._sums.views, start), strict=True):
            variable.assign(value)
        self._restore_statistics()
        self._restore_metrics()
        self._inner_optimizer._iterations.assign(self._start_iterations + self.feed.global_batches_in(current.number))
        self._commit(current)

    def _average(self, current: Step) -> bool:
        """Sum the changes of all members by their weights; return False if the world broke meanwhile."""
        assert self._sums is not None
        assert self.feed is not None
        part = current.weight / current.global_batch_size
        for view, variable, start in zip(self._sums.views, self._trained, self._round_start.values, strict=False):
            np.subtract(self._backend.read(variable), start, out=view, dtype=view.dtype)
            if part != 1.0:
                view *= view.dtype.type(part)
        if not self._exchange(current):
            return False
        current.data_s += self.feed.read_s
        current.compute_s -= self.feed.read_s
        return True

    def _undo_uncommitted(self) -> None:
        current = self.current
        if current is not None and not current.committed and self._recorded_round is current:
            self._round_start.restore()
        self._recorded_round = None
        super()._undo_uncommitted()


class KerasLocalLoop(KerasLocalTrainer, KerasLoopTrainer):
    """Local SGD under a script's own loop, which gets the local batches of a round one by one."""

    def _finish_micro_batch(self, current: Step) -> None:
        self._end_local_batch(current)
