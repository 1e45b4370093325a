"""The training loop of Keras underneath a run whose parameters are held by servers (see
`shoal.worker.parameter_server.ticket_loop`).

Each call of the model's train function does one ticket. The optimizer works on the servers, on a copy of its own for
each shard; what callbacks make of the learning rate goes there with every gradient. Metrics are each member's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.core.batch.auto_batch import AutoBatch
from shoal.core.batch.goodput import LrScaling
from shoal.core.data.sample_order import SampleOrder
from shoal.errors import UnusableModel
from shoal.keras.backends.base import Arrays, KerasBackend, Logs
from shoal.keras.fit.train_function import TrainFunction
from shoal.keras.fit.variables import kept_of, loss_in, reseed, seeds_of
from shoal.keras.modes.every_step import KerasTrainer
from shoal.keras.modes.server_shard import KerasShardLayout, KerasShardStore, gradients_of, take_over
from shoal.keras.modes.shard_optimizer import averages_of, refused
from shoal.worker.data.feed import Feed
from shoal.worker.parameter_server.rpc import Raw
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.parameter_server.ticket_loop import TicketLoop, TicketStep
from shoal.worker.training.noise_sampling import NoiseSampler
from shoal.worker.training.training_state import TrainingState


class KerasServedTrainer(TicketLoop, TrainFunction):
    """Computes the gradients of one model, ticket by ticket; what `shoal.keras.modes.every_step` is with `--sync
    step`.
    """

    def __init__(self, session: ServedSession, training_state: TrainingState, backend: KerasBackend) -> None:
        super().__init__(session, training_state)
        needs_all = refused(backend.optimizer)
        if needs_all is not None:
            raise self.unsupported(*needs_all)
        self.auto: AutoBatch | None = None
        self.noise_sampler = NoiseSampler(0)
        self.epoch_of: Callable[[int], int] = lambda _step: 0
        self._backend = backend
        self._seeds, self._kept = seeds_of(backend.model), kept_of(backend.model)
        self._layout: KerasShardLayout | None = None
        # The gradients of the pieces of a ticket, times their samples, by the ids of variables.
        self._sums: dict[int, NDArray[Any]] = {}
        # What layers hold before a ticket and after it, and what metrics hold before it.
        self._before: Arrays = []
        self._after: Arrays = []
        self._counted: Arrays = []
        self._keys: dict[int, tuple[int, Any]] = {}
        self._first_rate: tuple[float, int] | None = None
        self._came_in = False

    # --- what the train function asks

    def begin(self, feed: Feed, identity: str, seed: int) -> None:
        self._backend.statistics, self._backend.meters = self._kept, list(self._meters())
        super().begin(feed, identity, seed)

    @property
    def _next_step(self) -> int | None:
        return self.current.granted.ticket.step if self.current is not None else None

    @property
    def entered(self) -> int:
        """The step after that which this member begins with."""
        return self.current.granted.ticket.step + 1 if self.current is not None else self._session.step or 0

    def missed(self, inside: bool) -> Logs | None:  # noqa: ARG002
        """What the metrics say of an epoch if no ticket of it comes here: nothing, which is not the 0 of Keras."""
        return dict.fromkeys(self._backend.results(), math.nan)

    def law(self, asked: Literal["auto"] | LrScaling) -> LrScaling:  # noqa: ARG002
        raise self.unsupported("a global batch that is chosen while training", "pass a number as batch")

    # --- what the loop asks

    def _shard_store(self, order: SampleOrder, parts: int) -> KerasShardStore:
        return KerasShardStore(self._backend, order, parts)

    def _assign_parts(self, parts: int) -> None:
        self._layout = KerasShardLayout(self._backend.model, self._backend.read, parts)

    def _pull(self, life: int) -> None:
        super()._pull(life)
        if self._versions:
            # For schedules that are shown, and for models that look at it.
            self._backend.optimizer._iterations.assign(min(self._versions.values()))

    def _load_part(self, part: int, body: memoryview) -> None:
        layout, optimizer = self._layout, self._backend.optimizer
        assert layout is not None
        rate, step = take_over(layout, part, averages_of(optimizer, layout.trained[part]), body)
        if self._rate is not None and not self._came_in and not math.isnan(rate):
            # Others have trained before: whatever their callbacks made of the rate stands.
            self._first_rate = rate, step
            optimizer.learning_rate = rate

    @property
    def _rate(self) -> float | None:
        """The learning rate, if it is not a schedule's."""
        optimizer = self._backend.optimizer
        settable = hasattr(optimizer._learning_rate, "assign")
        return float(self._backend.read(optimizer._learning_rate)) if settable else None

    def _gradients(self, current: TicketStep) -> Mapping[int, tuple[bytes, Sequence[Raw]]]:
        layout, weight = self._layout, current.weight
        assert layout is not None
        means = (
            self._sums if len(current.micro_batches) == 1 else {key: one / weight for key, one in self._sums.items()}
        )
        typed = {key: one.astype(self._keys[key][1], copy=False) for key, one in means.items()}
        how = (weight, current.granted.ticket.step, self._rate)
        return {part: gradients_of(layout, part, typed, self._after, how) for part in layout.parts}

    def _seed(self, seed: int) -> None:
        self._backend.seed(seed)
        reseed(self._seeds, seed)
        self._before, self._counted = [self._backend.read(v).copy() for v in self._kept], []

    def _check_micro_batch(self, current: TicketStep, number: int) -> None:
        """The loop's body is ours."""

    def _end_ticket(self, current: TicketStep) -> None:
        if current.abandoned:
            for some, values in ((self._kept, self._before), (self._backend.meters, self._counted)):
                for variable, value in zip(some, values, strict=False):
                    variable.assign(value)

    # --- one ticket

    def _meters(self) -> Sequence[Any]:
        found: Sequence[Any] = self._backend.model.metrics_variables
        return found

    def _piece(self, batch: Any) -> Logs:
        current, backend = self.current, self._backend
        assert current is not None
        if current.backwards == 0:
            # What callbacks did since the ticket was granted, such as a validation, says nothing of our speed.
            current.started_at = time.perf_counter() - current.data_s
            self._open_ticket(current)
        try:
            computed = backend.compute(batch)
        except Exception as error:
            if not backend.is_out_of_memory(error):
                raise
            self.on_out_of_memory(error)
            return {}
        self._counted = self._counted or computed.before
        changes = [after.astype(np.float64) - one for after, one in zip(computed.after, computed.before, strict=True)]
        current.loss += loss_in(backend.model, backend.meters, changes)
        self._add(current, computed.gradients, backend.trained)
        if current.on_last_micro_batch:
            self._after = computed.statistics
            self._push(current)
        return computed.logs

    def _open_ticket(self, current: TicketStep) -> None:
        self._sums, self._came_in = {}, True
        if self._first_rate is not None:
            rate, step = self._first_rate
            if self.epoch_of(step) >= self.epoch_of(current.granted.ticket.step):
                # Callbacks have begun an epoch here that others had begun before.
                self._backend.optimizer.learning_rate = rate
            else:
                self._first_rate = None

    def _add(self, current: TicketStep, gradients: Arrays, variables: Sequence[Any]) -> None:
        samples = current.micro_batches[current.index].samples
        current.backwards += 1
        current.weight += samples
        if current.on_last_micro_batch and self._slowdown is not None:
            self._slowdown.before_exchange(current.samples, samples)
            self._slowdown.after_backward()
        alone = len(current.micro_batches) == 1
        for variable, gradient in zip(variables, gradients, strict=True):
            key = self._key_of(variable)
            weighed = gradient if alone else gradient.astype(self._keys[key][1]) * samples
            self._sums[key] = weighed if key not in self._sums else self._sums[key] + weighed

    def _key_of(self, variable: Any) -> int:
        """The id of a variable of the model, which its train step may have named by what is inside."""
        if not self._keys:
            for one in self._backend.model.trainable_variables:
                told = id(one), self._backend.read(one).dtype
                self._keys[id(one)] = self._keys[id(one.value)] = told
        if id(variable) not in self._keys:
            name = getattr(variable, "path", None) or getattr(variable, "name", variable)
            raise UnusableModel(
                f"{name} is trained, but is none of the model's trainable variables",
                why="servers hold what the model says that it trains",
                do="make it part of the model, or use --sync step",
            )
        return self._keys[id(variable)][0]


class KerasServedLoop(KerasServedTrainer):
    """For a loop of the script's own, which computes gradients and hands them to its optimizer; metrics are its own."""

    def take(self, gradients: list[Any], variables: list[Any] | None) -> None:
        """What the optimizer was asked to apply."""
        whole = variables or list(self._backend.model.trainable_variables)
        trained = [v for v, one in zip(whole, gradients, strict=True) if one is not None]
        self._backend.take(lambda arrays: self._given(arrays, trained), gradients, variables)

    def _meters(self) -> Sequence[Any]:
        return []

    def _given(self, gradients: Arrays, variables: Sequence[Any]) -> None:
        """Nothing is applied here; it is pushed when the script asks for its next batch."""
        current = self.current
        if current is None or current.committed or current.backwards > current.index:
            raise UnusableModel("the optimizer was applied twice for one batch", do="apply it once for each batch")
        if current.backwards == 0:
            self._open_ticket(current)
        self._add(current, [one.copy() for one in gradients], variables)

    def _check_micro_batch(self, current: TicketStep, number: int) -> None:
        step = current.granted.ticket.step
        if current.backwards <= number:
            raise UnusableModel(
                f"step {step} ended without optimizer.apply", do="apply the optimizer once for each batch"
            )
        if current.on_last_micro_batch:
            self._after = [self._backend.read(v) for v in self._kept]
            self._push(current)


AnyTrainer: TypeAlias = KerasTrainer | KerasServedTrainer
