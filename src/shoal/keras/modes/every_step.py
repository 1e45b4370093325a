"""The training loop for Keras: each call of the model's train function does one step of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.core.batch.goodput import LrScaling, lr_scaling_for
from shoal.errors import UnusableModel
from shoal.keras.backends.base import Arrays, KerasBackend, Logs, TrainStepResult
from shoal.keras.fit.train_function import TrainFunction
from shoal.keras.fit.variables import loss_in, reseed, seeds_of, statistics_of, weights_of
from shoal.keras.modes.gradient_norms import KerasGradientNorms, expected
from shoal.keras.modes.state import VariableGroup
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
    """Computes, sums and applies the gradients of one model.

    The model's metrics are summed over the members along with the gradients, and so are, as means, the statistics that
    its layers keep: all members hold the same numbers, and their callbacks decide the same.
    """

    def __init__(
        self, session: Session | StandaloneSession, training_state: TrainingState, backend: KerasBackend
    ) -> None:
        super().__init__(session, training_state)
        self._backend = backend
        model = backend.model
        self._seeds, self._statistics = seeds_of(model), statistics_of(model)
        self._meters: list[Any] = []
        self._sums: FlatBuffers | None = None
        self._likes = [ArraySpec(v.shape, str(v.dtype)) for v in model.trainable_variables]
        self._kept_statistics: Arrays = []
        self._kept_meters: Arrays = []
        self._squares: KerasGradientNorms | None = None
        # What layers and metrics hold since our last piece.
        self._now: tuple[Arrays, Arrays] = [], []
        self.epoch_of: Callable[[int], int] = lambda _step: 0
        # These change only when a step is applied, which waits for those who read them.
        self._at_rest = weights_of(model) | {id(v) for v in backend.optimizer.variables}
        training_state.parts["model"] = VariableGroup(lambda: model.variables, self._read_for_others)
        training_state.parts["optimizer"] = VariableGroup(lambda: backend.optimizer.variables, self._read_for_others)
        training_state.parts["metrics"] = VariableGroup(lambda: model.metrics_variables, self._read_for_others)
        training_state.parts["noise"] = self.noise_sampler.noise

    # --- what the train function asks

    def rehearse(self, batch: Any) -> None:
        """Do the work of a step once, if that makes the first one faster; everything is put back as it was."""
        backend = self._backend
        if not backend.compiles:
            return
        held = (*backend.model.variables, *backend.model.metrics_variables, *backend.optimizer.variables)
        before = [(one, backend.read(one).copy()) for one in {id(one): one for one in held}.values()]
        self._find_meters()
        with RngState().preserved():
            try:
                computed = backend.compute(batch)
                self._fit(computed.gradients)
                assert self._sums is not None
                backend.apply(self._sums.views, computed.statistics, computed.after)
            finally:
                for variable, value in before:
                    variable.assign(value)

    @property
    def _next_step(self) -> int | None:
        return self.current.number if self.current is not None else None

    @property
    def entered(self) -> int:
        """The step that this member begins with; what came before it may have been the end of an epoch."""
        return self._session.step or 0

    def missed(self, inside: bool) -> Logs | None:
        """What the metrics say when Keras begins an epoch, if this member comes in `inside` it."""
        if not inside:
            return None
        # Keras has just reset the metrics of those of its steps that others did.
        self.put_meters_back()
        return self.results()

    def put_meters_back(self) -> None:
        """The metrics as they were when this member came in; Keras resets them when an epoch begins."""
        for variable, value in zip(self._meters, self._kept_meters, strict=True):
            variable.assign(value)

    # --- the loop

    def _start_loop(self, feed: Feed) -> bool:  # noqa: ARG002
        self._find_meters()
        self._keep()
        self._training_state.after_load.append(self._keep)
        self._set_up()
        return True

    def _find_meters(self) -> None:
        model = self._backend.model
        self._meters = [v for v in model.metrics_variables if getattr(v, "aggregation", "sum") == "sum"]
        self._backend.statistics, self._backend.meters = self._statistics, self._meters

    def _set_up(self) -> None:
        if self._sums is None:
            tail = sum(int(np.prod(v.shape)) for v in (*self._statistics, *self._meters))
            self._sums = FlatBuffers(self._likes, tail)

    def _keep(self) -> None:
        read = self._backend.read
        self._kept_statistics = [read(v).copy() for v in self._statistics]
        self._kept_meters = [read(v).copy() for v in self._meters]

    def _read_for_others(self, variable: Any) -> NDArray[Any]:
        """A copy of what a forward pass or a callback changes: others may still read it when the next step begins."""
        found = self._backend.read(variable)
        return found if id(variable) in self._at_rest and found.ndim else found.copy()

    def _undo_uncommitted(self) -> None:
        current = self.current
        if current is not None and not current.committed:
            self._put_statistics()
            self.put_meters_back()

    def _put_statistics(self) -> None:
        for variable, value in zip(self._statistics, self._kept_statistics, strict=True):
            variable.assign(value)

    def _zero_buffers(self) -> list[ZeroBuffer] | None:
        return self._sums.zero_buffers() if self._sums is not None and isinstance(self.feed, IndexedFeed) else None

    def _seed(self, seed: int) -> None:
        self._backend.seed(seed)
        reseed(self._seeds, seed)

    def _check_micro_batch(self, current: Step, number: int) -> None:
        """The loop's body is ours."""

    # --- one step

    def _piece(self, batch: Any) -> Logs:
        current, backend = self.current, self._backend
        assert current is not None
        try:
            computed = backend.compute(batch)
        except Exception as error:
            if not backend.is_out_of_memory(error):
                raise
            self.on_out_of_memory(error)
            return {}
        if current.backwards == 0:
            self._kept_meters = computed.before
        found = self._summed(current, computed.gradients, (computed.statistics, computed.after))
        results = self._change(current, found, computed)
        return results if results is not None and results.keys() == computed.logs.keys() else computed.logs

    def _change(self, current: Step, found: Arrays | None, computed: TrainStepResult) -> Logs | None:  # noqa: ARG002
        """Apply these gradients, if any; what the metrics say if that made a step."""
        if found is None:
            return None
        self._take_over(current)
        with self._gained(current):
            results = self._backend.apply(found, self._kept_statistics, self._kept_meters)
        self._commit(current)
        return results

    def _summed(self, current: Step, gradients: Arrays, now: tuple[Arrays, Arrays]) -> Arrays | None:
        """Take the gradients of a piece; those of the whole global batch, if they are complete and may be applied."""
        self._count(current, now)
        if self._session.broken:
            return None
        self._load(current, gradients)
        if not current.on_last_micro_batch:
            return None
        self._rest(current.samples, current.micro_batches[-1].samples)
        if not (self._exchange(current) and self._begin_commit()):
            return None
        assert self._sums is not None
        return self._sums.views

    def _count(self, current: Step, now: tuple[Arrays, Arrays]) -> None:
        """A piece was computed."""
        self._now = now
        if current.backwards == 0:
            self._squares = self._sounding(current)
        current.backwards += 1
        current.micro_batch_weight = float(current.micro_batches[current.index].samples)
        current.weight += current.micro_batch_weight

    def _rest(self, samples: int, last: int) -> None:
        """Take as long as a slower machine would, if that is asked for."""
        if self._slowdown is not None:
            self._slowdown.before_exchange(samples, last)
            self._slowdown.after_backward()

    # --- a global batch that is chosen while training

    def law(self, asked: Literal["auto"] | LrScaling) -> LrScaling:
        """By which law the learning rate follows the batch."""
        optimizer = getattr(self._backend.optimizer, "inner_optimizer", self._backend.optimizer)
        if not hasattr(optimizer._learning_rate, "assign"):
            raise UnusableModel(
                "a learning rate schedule cannot follow a global batch that is chosen while training",
                why="it counts steps, of which there are fewer with a larger batch",
                do="pass a number as learning rate, or as batch",
            )
        return lr_scaling_for(type(optimizer).__name__) if asked == "auto" else asked

    @contextmanager
    def _gained(self, current: Step) -> Iterator[None]:
        """The learning rate of this step is multiplied by what its batch gains over the one that was asked for."""
        gain = self.auto.lr_gain_at(current.number) if self.auto is not None else 1.0
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

    def _fit(self, gradients: Arrays) -> None:
        """Have room for the sums of as many gradients as there are."""
        if len(gradients) != len(self._likes):
            # Some variables have no gradient, in any member alike.
            self._likes = [ArraySpec(one.shape, one.dtype) for one in gradients]
            self._sums = None
        self._set_up()

    def _load(self, current: Step, gradients: Arrays) -> None:
        self._fit(gradients)
        assert self._sums is not None
        self._sums.load(gradients, current.micro_batch_weight / current.global_batch_size, add=current.backwards > 1)
        if self._squares is not None and is_halfway(current):
            self._squares.halve(self._sums.views, current.weight)

    def _sounding(self, current: Step) -> KerasGradientNorms | None:
        if not self.noise_sampler.due(current):
            return None
        usual = expected(self._backend.optimizer, self._backend.read, range(len(self._likes)))
        return KerasGradientNorms(usual) if usual is not None else None

    def _exchange(self, current: Step) -> bool:
        """Sum what all have; False if the world broke over it."""
        sums, exchange = self._sums, current.exchange
        assert sums is not None
        current.sending = True
        if current.empty:
            sums.clear()
        if self._squares is not None:
            self._squares.own(sums.views)
        current.gradient_norms = self._squares
        try:
            gathered = self._send_report(current)
            sums.send(exchange)
            current.compute_s = time.perf_counter() - current.started_at
            self._session.set_phase("exchange")
            total = self._receive_reports(current, gathered)
            self._fill_tail(current, total)
            sums.finish(exchange, total / current.global_batch_size if total else 1.0)
        except ExchangeBroken as broken:
            self._session.fail(broken)
            return False
        current.wait_s = time.perf_counter() - current.started_at - current.compute_s
        current.reduced = True
        if self._squares is not None:
            self._squares.everybody(sums.views)
        return True

    def _fill_tail(self, current: Step, total: float) -> None:
        """Our part of the mean of the layers' statistics, and what this step added to our metrics."""
        assert self._sums is not None
        part, (statistics, meters) = current.weight / total if total else 0.0, self._now
        changes = [one.astype(np.float64) - kept for one, kept in zip(meters, self._kept_meters, strict=True)]
        if not current.empty:
            current.loss = loss_in(self._backend.model, self._meters, changes)
        numbers = [part * one.astype(np.float64) for one in statistics]
        numbers += [np.zeros_like(one) if current.empty else one for one in changes]
        if numbers:
            np.concatenate([one.reshape(-1) for one in numbers], out=self._sums.tail)

    def _take_over(self, current: Step) -> None:
        """Everybody's statistics and metrics are ours."""
        assert self._sums is not None
        rest = self._sums.tail
        if any(p.weight for p in current.reports):
            self._kept_statistics = _received(self._kept_statistics, rest)
            rest = rest[sum(one.size for one in self._kept_statistics) :]
            added = _received(self._kept_meters, rest)
            self._kept_meters = [(a + b).astype(a.dtype) for a, b in zip(self._kept_meters, added, strict=True)]


class KerasLoopTrainer(KerasTrainer):
    """For a loop of the script's own, which computes gradients and hands them to its optimizer; metrics are its own."""

    def __init__(
        self, session: Session | StandaloneSession, training_state: TrainingState, backend: KerasBackend
    ) -> None:
        super().__init__(session, training_state, backend)
        del training_state.parts["metrics"]
        self._applied: Step | None = None

    def take(self, gradients: list[Any], variables: list[Any] | None) -> None:
        """What the optimizer was asked to apply."""
        self._backend.take(self._given, gradients, variables)

    def _start_loop(self, feed: Feed) -> bool:
        on_cpu = super()._start_loop(feed)
        self._meters, self._kept_meters, self._sums = [], [], None
        self._set_up()
        return on_cpu

    def law(self, asked: Literal["auto"] | LrScaling) -> LrScaling:  # noqa: ARG002
        raise UnusableModel(
            "batch=auto cannot be used with a loop of your own", do="use model.fit, or pass a number as batch"
        )

    def _given(self, gradients: Arrays) -> Arrays | None:
        current = self.current
        if current is None or current.committed or current.backwards > current.index:
            raise UnusableModel("the optimizer was applied twice for one batch", do="apply it once for each batch")
        found = self._summed(current, gradients, ([self._backend.read(v) for v in self._statistics], []))
        self._applied = current if found is not None else None
        return found

    def _check_micro_batch(self, current: Step, number: int) -> None:
        if current.backwards <= number:
            raise UnusableModel(
                f"step {current.number} ended without optimizer.apply", do="apply the optimizer once for each batch"
            )
        # Only now is the optimizer surely done.
        self._done(current)

    def _done(self, current: Step) -> None:
        """The optimizer has applied what it was given of a piece, if anything."""
        if self._applied is current:
            self._take_over(current)
            self._put_statistics()
            self._commit(current)


def _received(likes: Sequence[NDArray[Any]], flat: NDArray[np.float64]) -> Arrays:
    """The next numbers of a flat array, in the shapes and types of others."""
    found, start = [], 0
    for like in likes:
        found.append(flat[start : start + like.size].reshape(like.shape).astype(like.dtype))
        start += like.size
    return found
