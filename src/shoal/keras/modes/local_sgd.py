"""Local training with Keras (``--sync local:H``): each call of the model's train function does one round of the run.

What a round is, is said in `shoal.torch.modes.local_sgd` and docs/synchrony-local.md: a member trains on its share of
it with the model's own optimizer, batch by batch, and then all average what they have learned.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

from shoal.core import sync_mode
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
    """A trainer whose optimizer steps for itself, and whose steps are rounds."""

    feed: RoundFeed | None

    def __init__(
        self, session: Session | StandaloneSession, training_state: TrainingState, backend: KerasBackend
    ) -> None:
        super().__init__(session, training_state, backend)
        settings = session.settings
        self.length = sync_mode.parse(settings.sync).local
        # Gradients are never summed over members, so there is nothing to compare.
        self.noise_sampler.every_steps = 0
        self._inner = getattr(backend.optimizer, "inner_optimizer", backend.optimizer)
        for option in ("use_ema", "gradient_accumulation_steps"):
            if getattr(self._inner, option):
                self.refuse(f"an optimizer with {option}", "leave it out, or train with --sync step")
        self._trained: list[Any] = backend.model.trainable_variables
        self._outer = KerasOuterOptimizer(settings.outer_lr, settings.outer_momentum, self._trained)
        if self._outer.velocities:
            training_state.parts["outer"] = VariableGroup(
                lambda: self._outer.velocities, lambda velocity: velocity.value
            )
        self._start = KerasRoundStart(backend.read)
        self._kept_for: Step | None = None
        self._iterations = 0
        self._own: FlatBuffers | None = None

    def refuse(self, what: str, do: str) -> None:
        """Raise: the script asks for what local training cannot do."""
        raise UnsupportedWithLocalSgd(f"{what} cannot be used with --sync local:{self.length}", do=do)

    # --- one batch of a round

    def _summed(self, current: Step, gradients: Arrays, now: tuple[Arrays, Arrays]) -> Arrays | None:
        """Take the gradients of a piece; those of a whole batch of ours, if they are complete and count."""
        assert self.feed is not None
        self._count(current, now)
        if self._session.broken:
            return None
        number = bisect_left(self.feed.local_batches, current.index, key=lambda lot: lot.last)
        lot = self.feed.local_batches[number]
        if self._own is None or len(self._own.views) != len(gradients):
            self._own = FlatBuffers([ArraySpec(one.shape, one.dtype) for one in gradients], tail=0)
        self._own.load(gradients, current.micro_batch_weight / (lot.samples or 1), add=current.index > lot.first)
        if current.index < lot.last:
            return None
        self._rest(lot.samples, current.micro_batches[current.index].samples)
        if self._slowdown is not None:
            self._slowdown.begin(current.number)
        self._remember(current)
        if current.empty:
            return None
        # Schedules, and whatever else counts steps, are where they would be without rounds: see docs.
        self._inner._iterations.assign(self._iterations + self.feed.global_batches_due(current.number, number))
        return self._own.views

    def _remember(self, current: Step) -> None:
        """Before the first change of a round: copy what the round began with."""
        if self._kept_for is current:
            return
        self._training_state.before_change()
        self._session.before_change()
        self._start.keep([*self._trained, *self._backend.optimizer.variables])
        self._iterations = int(self._backend.read(self._inner._iterations))
        self._kept_for = current

    def _change(self, current: Step, found: Arrays | None, computed: TrainStepResult) -> Logs | None:
        if found is not None:
            self._backend.apply(found, computed.statistics, computed.after)
        self._end_batch(current)
        return self._backend.results() if current.committed else None

    # --- the end of a round

    def _end_batch(self, current: Step) -> None:
        """What there was to apply is applied; after the last batch, everybody's round becomes one."""
        if (
            not current.on_last_micro_batch
            or self._session.broken
            or not self._average(current)
            or not self._begin_commit()
        ):
            return
        assert self._sums is not None
        assert self.feed is not None
        self._take_over(current)
        start = self._start.values[: len(self._trained)]
        for variable, value in zip(self._trained, self._outer.step(self._sums.views, start), strict=True):
            variable.assign(value)
        self._put_statistics()
        self.put_meters_back()
        self._inner._iterations.assign(self._iterations + self.feed.global_batches_in(current.number))
        self._commit(current)

    def _average(self, current: Step) -> bool:
        """Sum the changes of all members by their weights; False if the world broke over it."""
        assert self._sums is not None
        assert self.feed is not None
        part = current.weight / current.global_batch_size
        for view, variable, value in zip(self._sums.views, self._trained, self._start.values, strict=False):
            np.subtract(self._backend.read(variable), value, out=view, dtype=view.dtype)
            if part != 1.0:
                view *= view.dtype.type(part)
        if not self._exchange(current):
            return False
        current.data_s += self.feed.read_s
        current.compute_s -= self.feed.read_s
        return True

    def _undo_uncommitted(self) -> None:
        current = self.current
        if current is not None and not current.committed and self._kept_for is current:
            self._start.put_back()
        self._kept_for = None
        super()._undo_uncommitted()


class KerasLocalLoop(KerasLocalTrainer, KerasLoopTrainer):
    """For a loop of the script's own: it is given one batch of a round after the other."""

    def _done(self, current: Step) -> None:
        self._end_batch(current)
