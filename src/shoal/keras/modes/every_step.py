"""Training loop of Keras models in the sync mode `step`: every call of the train function is one step of the run.

How `model.fit` drives a step, from the top:

1. `fit` calls the train function that the Elastic callback installed, and that calls `run_step` (fit.train_function),
   which takes micro-batches from `Loop.train` and passes each to `_train_micro_batch`.
2. `backend.compute` runs the model's own `train_step` up to its optimizer, in TensorFlow a traced graph. It returns
   NumPy arrays: gradients, the statistics of layers, and the metric variables before and after the micro-batch.
3. `_sum_gradients` adds the gradients, weighted by samples, to flat buffers. After the last micro-batch `_exchange`
   all-reduces the buffers together with the step reports. The result is the gradient of the whole global batch.
4. `backend.apply`, a second function, hands the sums to the optimizer, and assigns statistics and metrics. Then the
   step is committed.

*Metrics and statistics.* The flat buffers end with a tail of float64 numbers for what a step changes besides the
weights. For metrics it is the change of each summed variable in this step, so that the sum over the members, added to
the committed value, counts every sample once. For the statistics of layers (moving means, say) it is the member's
value times its part of the global batch, so that the sum is the mean. All members therefore hold the same metrics and
statistics after a commit; callbacks that look at them (EarlyStopping, ReduceLROnPlateau) decide alike on all members
without a message.

*Committed values.* `train_step` updates metrics and statistics in place, before it is known whether the step will be
committed. `_committed_metrics` and `_committed_statistics` are copies as of the last commit. They are the base of the
changes above; they are assigned again if the step fails, because the next world copies its state from a member that
must not show traces of an unfinished step; and the metrics are assigned again after Keras has reset them at the start
of an epoch that this member entered in the middle.

*Snapshots.* Other members may still read this member's state while the next step computes. Weights and optimizer
variables change only in `backend.apply`, which waits for the readers; all other variables are copied when they are
read.

*A script's own loop* (`KerasLoopTrainer`) calls `optimizer.apply` instead of `fit`; the optimizer guard passes its
gradients to `on_apply`. Its metrics are its own business, so only gradients and statistics are exchanged. The optimizer
surely has finished only when the loop asks for its next batch; the step is committed there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import keras
import numpy as np
from numpy.typing import NDArray

from shoal.core.batch.goodput import LrScaling, lr_scaling_for
from shoal.core.state_check import TensorDigest
from shoal.errors import UnusableModel
from shoal.keras.backends.base import Arrays, KerasBackend, Logs, TrainStepResult
from shoal.keras.fit.train_function import TrainFunction
from shoal.keras.fit.variables import layer_statistics, reseed, seed_variables, summed_loss, weight_ids
from shoal.keras.modes.gradient_norms import KerasGradientNorms, expected_sizes
from shoal.keras.modes.state import VariableGroup, tensor_digests
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.collectives.flat_buffers import ArraySpec, FlatBuffers
from shoal.worker.data.feed import Feed, IndexedFeed
from shoal.worker.data.rng_state import RngState
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.loop import Loop
from shoal.worker.training.noise_sampling import is_halfway
from shoal.worker.training.step import Step
from shoal.worker.training.training_state import TrainingState
from shoal.worker.transport.exchange_broken import ExchangeBroken


class KerasTrainer(Loop, TrainFunction):
    """Computes, sums and applies the gradients of one model, with its metrics and layer statistics."""

    def __init__(
        self, session: Session | StandaloneSession, training_state: TrainingState, backend: KerasBackend
    ) -> None:
        super().__init__(session, training_state)
        self._backend = backend
        model = backend.model
        self._seed_variables, self._statistics = seed_variables(model), layer_statistics(model)
        self._metric_variables: list[Any] = []
        self._sums: FlatBuffers | None = None
        self._gradient_specs = [ArraySpec(v.shape, str(v.dtype)) for v in model.trainable_variables]
        self._committed_statistics: Arrays = []
        self._committed_metrics: Arrays = []
        # Values after the last micro-batch of this member.
        self._new_statistics: Arrays = []
        self._new_metrics: Arrays = []
        self._norms: KerasGradientNorms | None = None
        self.epoch_of: Callable[[int], int] = lambda _step: 0
        # Variables that change only in `backend.apply`, which waits until no member reads them any more.
        self._stable_ids = weight_ids(model) | {id(v) for v in backend.optimizer.variables}
        training_state.parts["model"] = VariableGroup(lambda: model.variables, self._read_for_snapshot)
        training_state.parts["optimizer"] = VariableGroup(lambda: backend.optimizer.variables, self._read_for_snapshot)
        training_state.parts["metrics"] = VariableGroup(lambda: model.metrics_variables, self._read_for_snapshot)
        training_state.parts["noise"] = self.noise_sampler.noise

    # --- called around fit

    def warm_up(self, batch: Any) -> None:
        """Do a step and undo it, if that makes the first real step faster."""
        backend = self._backend
        if not backend.compiles:
            return
        changed = (*backend.model.variables, *backend.model.metrics_variables, *backend.optimizer.variables)
        unique = {id(variable): variable for variable in changed}.values()
        before = [(variable, backend.read(variable).copy()) for variable in unique]
        self._collect_metric_variables()
        with RngState().preserved():
            try:
                result = _compute_few(backend, batch)
                self._fit_buffers(result.gradients)
                assert self._sums is not None
                backend.apply(self._sums.views, result.statistics, result.metrics_after)
            finally:
                for variable, value in before:
                    variable.assign(value)

    @property
    def _next_step(self) -> int | None:
        return self.current.number if self.current is not None else None

    @property
    def entry_step(self) -> int:
        """The step that this member begins with; the one before it may have been the last of an epoch."""
        return self._session.step or 0

    def enter_epoch(self, partly_done: bool) -> Logs | None:
        """Restore the metrics of an epoch that was `partly_done` when this member entered it, and return their results.

        Keras resets the metrics whenever it begins an epoch. Return None if no step of the epoch is done.
        """
        if not partly_done:
            return None
        self._restore_metrics()
        return self.metric_results()

    def lr_scaling(self, setting: Literal["auto"] | LrScaling) -> LrScaling:
        """Return how the learning rate follows a global batch size that changes during training."""
        optimizer = getattr(self._backend.optimizer, "inner_optimizer", self._backend.optimizer)
        if not hasattr(optimizer._learning_rate, "assign"):
            raise UnusableModel(
                "batch=auto cannot be used with a learning rate schedule",
                why="a schedule counts steps, and there are fewer of them with a larger batch",
                do="pass a number as learning rate, or as batch",
            )
        return lr_scaling_for(type(optimizer).__name__) if setting == "auto" else setting

    # --- hooks of the loop

    def _start_loop(self, feed: Feed) -> bool:  # noqa: ARG002
        self._collect_metric_variables()
        self._record_committed()
        self._training_state.after_load.append(self._record_committed)
        self._ensure_buffers()
        return True

    def _undo_uncommitted(self) -> None:
        current = self.current
        if current is not None and not current.committed:
            self._restore_statistics()
            self._restore_metrics()

    def _zero_buffers(self) -> list[ZeroBuffer] | None:
        return self._sums.zero_buffers() if self._sums is not None and isinstance(self.feed, IndexedFeed) else None

    def _seed(self, seed: int) -> None:
        self._backend.seed(seed)
        reseed(self._seed_variables, seed)

    def _tensor_digests(self) -> Iterator[TensorDigest]:
        model, backend = self._backend.model, self._backend
        yield from tensor_digests("parameter", [v for v in model.variables if id(v) in weight_ids(model)], backend.read)
        yield from tensor_digests("buffer", self._statistics, backend.read)
        yield from tensor_digests("optimizer", backend.optimizer.variables, backend.read)

    def _arithmetic(self) -> str:
        return self._backend.arithmetic

    def _check_micro_batch(self, current: Step, number: int) -> None:
        """Accept every micro-batch: the loop body is not the script's."""

    # --- metrics and layer statistics

    def _collect_metric_variables(self) -> None:
        model = self._backend.model
        self._metric_variables = [v for v in model.metrics_variables if getattr(v, "aggregation", "sum") == "sum"]
        self._backend.statistics, self._backend.metric_variables = self._statistics, self._metric_variables

    def _record_committed(self) -> None:
        """Copy the statistics and metrics, which belong to a committed step now."""
        read = self._backend.read
        self._committed_statistics = [read(v).copy() for v in self._statistics]
        self._committed_metrics = [read(v).copy() for v in self._metric_variables]

    def _restore_statistics(self) -> None:
        for variable, value in zip(self._statistics, self._committed_statistics, strict=True):
            variable.assign(value)

    def _restore_metrics(self) -> None:
        for variable, value in zip(self._metric_variables, self._committed_metrics, strict=True):
            variable.assign(value)

    def _read_for_snapshot(self, variable: Any) -> NDArray[Any]:
        """Return a variable's value, a copy unless only a commit changes it; scalars are always copied."""
        value = self._backend.read(variable)
        return value if id(variable) in self._stable_ids and value.ndim else value.copy()

    # --- one micro-batch

    def _train_micro_batch(self, batch: Any) -> Logs:
        current, backend = self.current, self._backend
        assert current is not None
        try:
            result = backend.compute(batch)
        except Exception as error:
            if not backend.is_out_of_memory(error):
                raise
            self.on_out_of_memory(error)
            return {}
        if current.backwards == 0:
            self._committed_metrics = result.metrics_before
        sums = self._sum_gradients(current, result.gradients, result.statistics, result.metrics_after)
        logs = self._apply_sums(current, sums, result)
        return logs if logs is not None and logs.keys() == result.logs.keys() else result.logs

    def _sum_gradients(self, current: Step, gradients: Arrays, statistics: Arrays, metrics: Arrays) -> Arrays | None:
        """Add the gradients of a micro-batch; return those of the global batch once they may be applied."""
        self._count_micro_batch(current, statistics, metrics)
        if self._session.broken:
            return None
        self._add_gradients(current, gradients)
        if not current.on_last_micro_batch:
            return None
        self._emulate_slowdown(current.samples, current.micro_batches[-1].samples)
        if not (self._exchange(current) and self._begin_commit()):
            return None
        assert self._sums is not None
        return self._sums.views

    def _apply_sums(self, current: Step, sums: Arrays | None, result: TrainStepResult) -> Logs | None:  # noqa: ARG002
        """Apply the gradients of the global batch and commit the step; return the metric results, None without sums."""
        if sums is None:
            return None
        self._adopt_tail(current)
        with self._scaled_learning_rate(current):
            logs = self._backend.apply(sums, self._committed_statistics, self._committed_metrics)
        self._commit(current)
        return logs

    def _count_micro_batch(self, current: Step, statistics: Arrays, metrics: Arrays) -> None:
        self._new_statistics, self._new_metrics = statistics, metrics
        if current.backwards == 0:
            self._norms = self._new_norms(current)
        current.backwards += 1
        current.micro_batch_weight = float(current.micro_batches[current.index].samples)
        current.weight += current.micro_batch_weight

    def _add_gradients(self, current: Step, gradients: Arrays) -> None:
        self._fit_buffers(gradients)
        assert self._sums is not None
        self._sums.load(gradients, current.micro_batch_weight / current.global_batch_size, add=current.backwards > 1)
        if self._norms is not None and is_halfway(current):
            self._norms.record_first_half(self._sums.views, current.weight)

    def _fit_buffers(self, gradients: Arrays) -> None:
        """Create the buffers again if some variables have no gradient, which is so on every member alike."""
        if len(gradients) != len(self._gradient_specs):
            self._gradient_specs = [ArraySpec(gradient.shape, gradient.dtype) for gradient in gradients]
            self._sums = None
        self._ensure_buffers()

    def _ensure_buffers(self) -> None:
        if self._sums is None:
            tail = sum(int(np.prod(v.shape)) for v in (*self._statistics, *self._metric_variables))
            self._sums = FlatBuffers(self._gradient_specs, tail)

    def _emulate_slowdown(self, samples: int, last_samples: int) -> None:
        """Wait as long as a slower machine would have computed, if one is emulated."""
        if self._slowdown is not None:
            self._slowdown.before_exchange(samples, last_samples)
            self._slowdown.after_backward()

    def _new_norms(self, current: Step) -> KerasGradientNorms | None:
        if not self.noise_sampler.due(current):
            return None
        sizes = expected_sizes(self._backend.optimizer, self._backend.read, range(len(self._gradient_specs)))
        return KerasGradientNorms(sizes) if sizes is not None else None

    # --- the exchange

    def _exchange(self, current: Step) -> bool:
        """Sum the buffers over all members; return False if the world broke meanwhile."""
        sums, exchange = self._sums, current.exchange
        assert sums is not None
        current.sending = True
        if current.empty:
            sums.clear()
        if self._norms is not None:
            self._norms.record_local(sums.views)
        current.gradient_norms = self._norms
        try:
            gathered = self._send_report(current)
            sums.send(exchange)
            current.compute_s = time.perf_counter() - current.started_at
            self._begin_exchange()
            total = self._receive_reports(current, gathered)
            self._fill_tail(current, total)
            sums.finish(exchange, total / current.global_batch_size if total else 1.0)
            self._state_check.compare(current)
        except ExchangeBroken as broken:
            self._on_exchange_broken(current, broken)
            return False
        current.wait_s = time.perf_counter() - current.started_at - current.compute_s
        current.reduced = True
        if self._norms is not None:
            self._norms.record_total(sums.views)
        return True

    def _fill_tail(self, current: Step, total: float) -> None:
        """Write this member's part of the mean statistics, and the changes of its metrics, behind the gradients."""
        assert self._sums is not None
        part = current.weight / total if total else 0.0
        changes = [
            new.astype(np.float64) - committed
            for new, committed in zip(self._new_metrics, self._committed_metrics, strict=True)
        ]
        if not current.empty:
            current.loss = summed_loss(self._backend.model, self._metric_variables, changes)
        numbers = [part * values.astype(np.float64) for values in self._new_statistics]
        numbers += [np.zeros_like(change) if current.empty else change for change in changes]
        if numbers:
            np.concatenate([values.reshape(-1) for values in numbers], out=self._sums.tail)

    def _adopt_tail(self, current: Step) -> None:
        """Take the mean statistics and the summed changes of metrics as the committed ones."""
        assert self._sums is not None
        tail = self._sums.tail
        if any(report.weight for report in current.reports):
            self._committed_statistics = _unflatten(self._committed_statistics, tail)
            tail = tail[sum(values.size for values in self._committed_statistics) :]
            changes = _unflatten(self._committed_metrics, tail)
            self._committed_metrics = [
                (committed + change).astype(committed.dtype)
                for committed, change in zip(self._committed_metrics, changes, strict=True)
            ]

    @contextmanager
    def _scaled_learning_rate(self, current: Step) -> Iterator[None]:
        """Multiply the learning rate by the gain of this step's batch over the configured one, inside the block."""
        gain = self.auto.lr_gain_at(current.number, current.global_batch_size) if self.auto is not None else 1.0
        if gain == 1.0:
            yield
            return
        rate = getattr(self._backend.optimizer, "inner_optimizer", self._backend.optimizer)._learning_rate
        before = self._backend.read(rate).copy()
        rate.assign(before * gain)
        try:
            yield
        finally:
            rate.assign(before)


class KerasLoopTrainer(KerasTrainer):
    """Trainer under a script's own loop, which computes gradients, applies its optimizer and keeps its own metrics."""

    def __init__(
        self, session: Session | StandaloneSession, training_state: TrainingState, backend: KerasBackend
    ) -> None:
        super().__init__(session, training_state, backend)
        del training_state.parts["metrics"]
        self._applied_step: Step | None = None

    def on_apply(self, gradients: list[Any], variables: list[Any] | None) -> None:
        """Handle a call of `optimizer.apply`."""
        self._backend.sum_and_apply(self._sum_loop_gradients, gradients, variables)

    def lr_scaling(self, setting: Literal["auto"] | LrScaling) -> LrScaling:  # noqa: ARG002
        raise UnusableModel(
            "batch=auto cannot be used with a loop of your own", do="use model.fit, or pass a number as batch"
        )

    def _start_loop(self, feed: Feed) -> bool:
        on_cpu = super()._start_loop(feed)
        self._metric_variables, self._committed_metrics, self._sums = [], [], None
        self._ensure_buffers()
        return on_cpu

    def _sum_loop_gradients(self, gradients: Arrays) -> Arrays | None:
        current = self.current
        if current is None or current.committed or current.backwards > current.index:
            raise UnusableModel("the optimizer was applied twice for one batch", do="apply it once for each batch")
        statistics = [self._backend.read(v) for v in self._statistics]
        sums = self._sum_gradients(current, gradients, statistics, [])
        self._applied_step = current if sums is not None else None
        return sums

    def _check_micro_batch(self, current: Step, number: int) -> None:
        if current.backwards <= number:
            raise UnusableModel(
                f"step {current.number} ended without optimizer.apply", do="apply the optimizer once for each batch"
            )
        # Not before: inside a tf.function the optimizer may run after `on_apply` has returned.
        self._finish_micro_batch(current)

    def _finish_micro_batch(self, current: Step) -> None:
        """Commit the step if the optimizer has applied its gradients."""
        if self._applied_step is current:
            self._adopt_tail(current)
            self._restore_statistics()
            self._commit(current)


def _unflatten(likes: Sequence[NDArray[Any]], flat: NDArray[np.float64]) -> Arrays:
    """Return the first numbers of a flat array as arrays with the shapes and types of `likes`."""
    arrays, start = [], 0
    for like in likes:
        arrays.append(flat[start : start + like.size].reshape(like.shape).astype(like.dtype))
        start += like.size
    return arrays


def _compute_few(backend: KerasBackend, batch: Any) -> TrainStepResult:
    """Compute the gradients of a few samples; explain an error that their small number may have caused."""
    try:
        return backend.compute(batch)
    except UnusableModel:
        raise
    except Exception as error:
        samples = len(keras.tree.flatten(batch)[0])
        error.add_note(
            f"Shoal called train_step with {samples} samples. The number of samples differs between members and steps:"
            " a train_step, layer or loss must take it from its data, not from a constant such as batch_size."
        )
        raise
