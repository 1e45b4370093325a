"""Training loop of Keras models whose parameters are on servers (see `shoal.worker.parameter_server.ticket_loop`).

Every call of the train function is one ticket. Optimizers run on the servers, one copy for each shard; a learning rate
set by callbacks goes there with every gradient. Metrics are each member's own.

A member that joins pulls the learning rate with the variables, together with the step it belongs to. Its own callbacks
may already have changed the rate for an epoch that other members began before: until a ticket of a later epoch comes,
the pulled rate is set again at the start of each ticket.
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
from shoal.keras.fit.variables import layer_state, reseed, seed_variables, summed_loss
from shoal.keras.modes.every_step import KerasTrainer
from shoal.keras.modes.server_shard import KerasShardLayout, KerasShardStore, encode_push, load_pulled
from shoal.keras.modes.shard_optimizer import moving_averages, unsupported_feature
from shoal.worker.data.feed import Feed
from shoal.worker.parameter_server.rpc import Raw
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.parameter_server.ticket_loop import TicketLoop, TicketStep
from shoal.worker.training.noise_sampling import NoiseSampler
from shoal.worker.training.training_state import TrainingState


class KerasServedTrainer(TicketLoop, TrainFunction):
    """Computes the gradients of one model, ticket by ticket, and pushes them to the servers."""

    def __init__(self, session: ServedSession, training_state: TrainingState, backend: KerasBackend) -> None:
        super().__init__(session, training_state)
        unsupported = unsupported_feature(backend.optimizer)
        if unsupported is not None:
            raise self.unsupported(*unsupported)
        self.auto: AutoBatch | None = None
        self.noise_sampler = NoiseSampler(0)
        self.epoch_of: Callable[[int], int] = lambda _step: 0
        self._backend = backend
        self._seed_variables, self._layer_state = seed_variables(backend.model), layer_state(backend.model)
        self._layout: KerasShardLayout | None = None
        # Gradients of a ticket's micro-batches times their samples, by the id of the variable.
        self._sums: dict[int, NDArray[Any]] = {}
        # Layer state before and after a ticket, and the metric variables before it.
        self._state_before: Arrays = []
        self._state_after: Arrays = []
        self._metrics_before: Arrays = []
        # The id and type of a model's variable, by its own id and that of its backend's tensor.
        self._variable_keys: dict[int, tuple[int, Any]] = {}
        # The learning rate that this member pulled before its first ticket, and the step that it belongs to.
        self._pulled_rate: tuple[float, int] | None = None
        self._has_started = False

    # --- called around fit

    def begin(self, feed: Feed, identity: str, seed: int) -> None:
        self._backend.statistics = self._layer_state
        self._backend.metric_variables = list(self._metric_variables())
        super().begin(feed, identity, seed)

    @property
    def _next_step(self) -> int | None:
        return self.current.granted.ticket.step if self.current is not None else None

    @property
    def entry_step(self) -> int:
        """The step after that of this member's first ticket."""
        return self.current.granted.ticket.step + 1 if self.current is not None else self._session.step or 0

    def enter_epoch(self, partly_done: bool) -> Logs | None:  # noqa: ARG002
        """Return NaN for every metric: the result if this member gets no ticket of the epoch; Keras would report 0."""
        return dict.fromkeys(self._backend.metric_results(), math.nan)

    def lr_scaling(self, setting: Literal["auto"] | LrScaling) -> LrScaling:  # noqa: ARG002
        raise self.unsupported("batch=auto", "pass a number as batch")

    # --- hooks of the ticket loop

    def _shard_store(self, order: SampleOrder, parts: int) -> KerasShardStore:
        return KerasShardStore(self._backend, order, parts)

    def _assign_parts(self, parts: int) -> None:
        self._layout = KerasShardLayout(self._backend.model, self._backend.read, parts)

    def _pull(self, generation: int) -> None:
        super()._pull(generation)
        if self._versions:
            # For schedules whose rate is shown, and for models that read the iterations.
            self._backend.optimizer._iterations.assign(min(self._versions.values()))

    def _load_part(self, part: int, body: memoryview) -> None:
        layout, optimizer = self._layout, self._backend.optimizer
        assert layout is not None
        rate, step = load_pulled(layout, part, moving_averages(optimizer, layout.trained[part]), body)
        if self._learning_rate is not None and not self._has_started and not math.isnan(rate):
            # The callbacks of earlier members have set this rate.
            self._pulled_rate = rate, step
            optimizer.learning_rate = rate

    @property
    def _learning_rate(self) -> float | None:
        """The learning rate; None if a schedule computes it."""
        optimizer = self._backend.optimizer
        settable = hasattr(optimizer._learning_rate, "assign")
        return float(self._backend.read(optimizer._learning_rate)) if settable else None

    def _gradients(self, current: TicketStep) -> Mapping[int, tuple[bytes, Sequence[Raw]]]:
        layout, weight = self._layout, current.weight
        assert layout is not None
        means = (
            self._sums
            if len(current.micro_batches) == 1
            else {key: total / weight for key, total in self._sums.items()}
        )
        typed = {key: mean.astype(self._variable_keys[key][1], copy=False) for key, mean in means.items()}
        header = (weight, current.granted.ticket.step, self._learning_rate)
        return {part: encode_push(layout, part, typed, self._state_after, header) for part in layout.parts}

    def _seed(self, seed: int) -> None:
        self._backend.seed(seed)
        reseed(self._seed_variables, seed)
        self._state_before = [self._backend.read(v).copy() for v in self._layer_state]
        self._metrics_before = []

    def _check_micro_batch(self, current: TicketStep, number: int) -> None:
        """Accept every micro-batch: the loop body is not the script's."""

    def _end_ticket(self, current: TicketStep) -> None:
        if current.abandoned:
            for variables, values in (
                (self._layer_state, self._state_before),
                (self._backend.metric_variables, self._metrics_before),
            ):
                for variable, value in zip(variables, values, strict=False):
                    variable.assign(value)

    # --- one ticket

    def _metric_variables(self) -> Sequence[Any]:
        variables: Sequence[Any] = self._backend.model.metrics_variables
        return variables

    def _train_micro_batch(self, batch: Any) -> Logs:
        current, backend = self.current, self._backend
        assert current is not None
        if current.backwards == 0:
            # The time that callbacks took since the ticket was granted, for a validation say, is not ours.
            current.started_at = time.perf_counter() - current.data_s
            self._open_ticket(current)
        try:
            result = backend.compute(batch)
        except Exception as error:
            if not backend.is_out_of_memory(error):
                raise
            self.on_out_of_memory(error)
            return {}
        self._metrics_before = self._metrics_before or result.metrics_before
        changes = [
            after.astype(np.float64) - before
            for after, before in zip(result.metrics_after, result.metrics_before, strict=True)
        ]
        current.loss += summed_loss(backend.model, backend.metric_variables, changes)
        self._add_gradients(current, result.gradients, backend.variables_with_gradient)
        if current.on_last_micro_batch:
            self._state_after = result.statistics
            self._push(current)
        return result.logs

    def _open_ticket(self, current: TicketStep) -> None:
        self._sums, self._has_started = {}, True
        if self._pulled_rate is not None:
            rate, step = self._pulled_rate
            if self.epoch_of(step) >= self.epoch_of(current.granted.ticket.step):
                # Our callbacks have begun an epoch that other members had begun before.
                self._backend.optimizer.learning_rate = rate
            else:
                self._pulled_rate = None

    def _add_gradients(self, current: TicketStep, gradients: Arrays, variables: Sequence[Any]) -> None:
        samples = current.micro_batches[current.index].samples
        current.backwards += 1
        current.weight += samples
        if current.on_last_micro_batch and self._slowdown is not None:
            self._slowdown.before_exchange(current.samples, samples)
            self._slowdown.after_backward()
        is_whole = len(current.micro_batches) == 1
        for variable, gradient in zip(variables, gradients, strict=True):
            key = self._key_of(variable)
            weighted = gradient if is_whole else gradient.astype(self._variable_keys[key][1]) * samples
            self._sums[key] = weighted if key not in self._sums else self._sums[key] + weighted

    def _key_of(self, variable: Any) -> int:
        """Return the id of the model's variable; a train step may name it by the backend's tensor inside."""
        if not self._variable_keys:
            for trained in self._backend.model.trainable_variables:
                key = id(trained), self._backend.read(trained).dtype
                self._variable_keys[id(trained)] = self._variable_keys[id(trained.value)] = key
        if id(variable) not in self._variable_keys:
            name = getattr(variable, "path", None) or getattr(variable, "name", variable)
            raise UnusableModel(
                f"{name} is trained, but is not one of the model's trainable variables",
                why="servers hold only the variables that the model lists",
                do="make it part of the model, or use --sync step",
            )
        return self._variable_keys[id(variable)][0]


class KerasServedLoop(KerasServedTrainer):
    """Served trainer under a script's own loop, which computes gradients and applies its optimizer to them."""

    def on_apply(self, gradients: list[Any], variables: list[Any] | None) -> None:
        """Handle a call of `optimizer.apply`."""
        listed = variables or list(self._backend.model.trainable_variables)
        trained = [variable for variable, gradient in zip(listed, gradients, strict=True) if gradient is not None]
        self._backend.sum_and_apply(lambda arrays: self._add_loop_gradients(arrays, trained), gradients, variables)

    def _metric_variables(self) -> Sequence[Any]:
        return []

    def _add_loop_gradients(self, gradients: Arrays, variables: Sequence[Any]) -> None:
        """Add gradients; they are pushed when the script asks for its next batch, and never applied here."""
        current = self.current
        if current is None or current.committed or current.backwards > current.index:
            raise UnusableModel("the optimizer was applied twice for one batch", do="apply it once for each batch")
        if current.backwards == 0:
            self._open_ticket(current)
        self._add_gradients(current, [gradient.copy() for gradient in gradients], variables)

    def _check_micro_batch(self, current: TicketStep, number: int) -> None:
        step = current.granted.ticket.step
        if current.backwards <= number:
            raise UnusableModel(
                f"step {step} ended without optimizer.apply", do="apply the optimizer once for each batch"
            )
        if current.on_last_micro_batch:
            self._state_after = [self._backend.read(v) for v in self._layer_state]
            self._push(current)


AnyTrainer: TypeAlias = KerasTrainer | KerasServedTrainer
