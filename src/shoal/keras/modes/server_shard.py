"""What a server does with the gradients of a Keras model: it sums them up, and steps shard by shard.

A step is due whenever a global batch's worth of samples has come in, whoever computed them: so the learning rate, the
number of iterations and a schedule mean what they mean in any other mode. Each shard has an optimizer of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.core import placement
from shoal.core.data.sample_order import SampleOrder
from shoal.errors import StateMalformed, UnsupportedWithServers
from shoal.keras.backends.base import Arrays, KerasBackend
from shoal.keras.fit.variables import kept_of, weights_of
from shoal.keras.modes.shard_optimizer import averages_of, copy_of
from shoal.worker.parameter_server.rpc import MalformedFrame, Raw
from shoal.worker.transport.snapshot import Bytes

Read = Callable[[Any], NDArray[Any]]


class KerasPushHeader(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a push are: which of the shard's variables have a gradient, and what it counts for.

    `rate` is the learning rate that the trainer had set for it, at this step, if it is not a schedule's.
    """

    weight: float
    step: int
    rate: float | None
    present: list[bool]


class KerasShardLayout:
    """Which variables of a model are in which part; the same on every member."""

    def __init__(self, model: Any, read: Read, parts: int) -> None:
        self._read = read
        self._likes: dict[int, NDArray[Any]] = {}
        trained = list(model.trainable_variables)
        frozen = weights_of(model) - {id(v) for v in trained}
        weights = [*trained, *(v for v in model.non_trainable_variables if id(v) in frozen)]
        sizes_bytes = [self.like(v).nbytes for v in weights]
        self.kept = kept_of(model)
        self.parts = {
            number: [weights[i] for i in indices]
            for number, indices in enumerate(placement.divide(sizes_bytes, parts - 1), start=1)
        }
        self.trained = {
            number: [v for v in variables if id(v) not in frozen] for number, variables in self.parts.items()
        }

    def like(self, variable: Any) -> NDArray[Any]:
        """An array of a variable's shape and type that takes no memory; to read the variable would take a copy."""
        if id(variable) not in self._likes:
            self._likes[id(variable)] = np.broadcast_to(np.zeros((), self._read(variable).dtype), variable.shape)
        return self._likes[id(variable)]

    def kept_in(self, part: int) -> list[Any]:
        """The first shard carries along what layers keep."""
        return self.kept if part == 1 else []

    def variables_of(self, part: int) -> list[Any]:
        return [*self.parts[part], *self.kept_in(part)]


class _KerasShardState:
    """How far one shard is, and what it steps with."""

    def __init__(self, layout: KerasShardLayout, part: int, script: Any, backend: KerasBackend) -> None:
        self.trained, self._like = layout.trained[part], layout.like
        self.sums: list[NDArray[Any] | None] = [None] * len(self.trained)
        self.weight = 0.0
        self.samples = 0
        self.steps = 0
        self.rate: float | None = None
        self.newest = -1
        self.optimizer = copy_of(script, self.trained) if self.trained else None
        self._backend = backend
        self._appliers: dict[tuple[bool, ...], Callable[[Arrays], None]] = {}

    def state(self) -> list[Any]:
        """The variables of its optimizer."""
        return list(self.optimizer.variables) if self.optimizer is not None else []

    def averages(self) -> list[Any]:
        return averages_of(self.optimizer, self.trained) if self.optimizer is not None else []

    def add(self, index: int, gradient: NDArray[Any], weight: float) -> None:
        exact = _exact(gradient)
        known = self.sums[index]
        if known is None:
            self.sums[index] = gradient.astype(exact) * exact(weight)
        else:
            known += gradient.astype(exact) * exact(weight)

    def set_rate(self, rate: float | None, step: int) -> None:
        """What callbacks of trainers make of the learning rate: that of the newest ticket counts."""
        if rate is not None and step >= self.newest:
            self.rate, self.newest = rate, step

    def step(self, due: int) -> None:
        """One step with all that has come in; a ticket that completes two short batches counts as both."""
        present = tuple(one is not None for one in self.sums)
        if self.optimizer is not None and any(present) and self.weight > 0:
            if self.rate is not None:
                self.optimizer.learning_rate = self.rate
            self.optimizer._iterations.assign(self.steps)
            gradients = [
                (one / one.dtype.type(self.weight)).astype(self._like(v).dtype, copy=False)
                for v, one in zip(self.trained, self.sums, strict=True)
                if one is not None
            ]
            self._applier(present)(gradients)
        self.sums, self.weight = [None] * len(self.trained), 0.0
        self.steps += due

    def _applier(self, present: tuple[bool, ...]) -> Callable[[Arrays], None]:
        """Made once for each set of variables that have gradients, which hardly ever changes."""
        if present not in self._appliers:
            wanted = [v for v, there in zip(self.trained, present, strict=True) if there]
            self._appliers[present] = self._backend.applier(self.optimizer, wanted)
        return self._appliers[present]


class _SavedShard(msgspec.Struct, array_like=True):
    """What of a lane is not an array; `sums` are those of its variables that a sum follows for."""

    weight: float
    samples: int
    steps: int
    rate: float | None
    newest: int
    sums: list[bool]


class KerasShardStore:
    """The shards of a model on one server."""

    def __init__(self, backend: KerasBackend, order: SampleOrder, parts: int) -> None:
        self.layout = KerasShardLayout(backend.model, backend.read, parts)
        self._backend, self._order = backend, order
        self._lock = threading.RLock()
        self._built = {part: self._values(self.layout.variables_of(part)) for part in self.layout.parts}
        self._lanes = {part: self._new_lane(part) for part in self.layout.parts}

    def _new_lane(self, part: int) -> _KerasShardState:
        return _KerasShardState(self.layout, part, self._backend.optimizer, self._backend)

    def _values(self, variables: Sequence[Any]) -> Arrays:
        return [self._backend.read(v).copy() for v in variables]

    # --- gradients

    def apply(self, part: int, how: bytes, samples: int, body: memoryview) -> None:
        told = msgspec.msgpack.decode(how, type=KerasPushHeader)
        with self._lock:
            lane, kept = self._lanes[part], self.layout.kept_in(part)
            places = [index for index, there in enumerate(told.present) if there]
            likes = [self.layout.like(v) for v in (*(lane.trained[index] for index in places), *kept)]
            pieces = arrays_of(body, likes)
            for index, gradient in zip(places, pieces[: len(places)], strict=True):
                lane.add(index, gradient, told.weight)
            fraction = min(1.0, samples / self._order.size_of(told.step))
            for variable, pushed in zip(kept, pieces[len(places) :], strict=True):
                variable.assign(_blended(self._backend.read(variable), pushed, fraction))
            lane.weight += told.weight
            lane.samples += samples
            lane.set_rate(told.rate, told.step)
            due = self._order.steps_within(lane.samples) - lane.steps
            if due > 0:
                self._step(lane, due)

    def _step(self, lane: _KerasShardState, due: int) -> None:
        try:
            lane.step(due)
        except Exception as error:
            kind = type(lane.optimizer).__name__
            raise UnsupportedWithServers(
                f"{kind} cannot step with a part of the model: {type(error).__name__}: {error}",
                why="servers have the gradients of their own variables only",
                do="use an optimizer that changes each variable for itself, or --sync step",
            ) from error

    # --- reading

    def version(self, part: int) -> int:
        return self._lanes[part].steps

    def parameters(self, part: int) -> list[Bytes]:
        """The variables of a part, their moving averages, and the learning rate with the step that it is of."""
        with self._lock:
            lane = self._lanes[part]
            values = self._values([*self.layout.variables_of(part), *lane.averages()])
            rate = np.array([math.nan if lane.rate is None else lane.rate, lane.newest])
            return [as_bytes(one) for one in (*values, rate)]

    # --- handing over

    def capture(self, part: int) -> tuple[bytes, list[Bytes]]:
        with self._lock:
            lane = self._lanes[part]
            values = self._values([*self.layout.variables_of(part), *lane.state()])
            sums = [one.copy() for one in lane.sums if one is not None]
            there = [one is not None for one in lane.sums]
            saved = _SavedShard(lane.weight, lane.samples, lane.steps, lane.rate, lane.newest, there)
            return msgspec.msgpack.encode(saved), [as_bytes(one) for one in (*values, *sums)]

    def install(self, part: int, header: bytes, buffers: Sequence[Raw]) -> None:
        saved = msgspec.msgpack.decode(header, type=_SavedShard)
        with self._lock:
            lane = self._new_lane(part)
            variables = [*self.layout.variables_of(part), *lane.state()]
            likes = [*map(self.layout.like, self.layout.variables_of(part)), *map(self._backend.read, lane.state())]
            wanted = [self.layout.like(v) for v, there in zip(lane.trained, saved.sums, strict=True) if there]
            likes += [np.broadcast_to(np.zeros((), _exact(one)), one.shape) for one in wanted]
            if [len(one) for one in buffers] != [one.nbytes for one in likes]:
                raise StateMalformed(
                    f"the state of shard {part} is not that of this model",
                    do="run the same script everywhere, and go on with what the run was begun with",
                )
            values = [_array(one, like) for one, like in zip(buffers, likes, strict=True)]
            for variable, value in zip(variables, values[: len(variables)], strict=True):
                variable.assign(value)
            sums = iter(values[len(variables) :])
            lane.sums = [next(sums).copy() if there else None for there in saved.sums]
            lane.weight, lane.samples, lane.steps = saved.weight, saved.samples, saved.steps
            lane.rate, lane.newest = saved.rate, saved.newest
            self._lanes[part] = lane

    def reset(self, part: int) -> None:
        with self._lock:
            for variable, built in zip(self.layout.variables_of(part), self._built[part], strict=True):
                variable.assign(built)
            self._lanes[part] = self._new_lane(part)


def gradients_of(
    layout: KerasShardLayout,
    part: int,
    gradients: dict[int, NDArray[Any]],
    kept: Arrays,
    how: tuple[float, int, float | None],
) -> tuple[bytes, list[Bytes]]:
    """What a trainer pushes to one part: of its gradients, by the ids of variables, and of what its layers keep."""
    trained = layout.trained[part]
    present = [id(v) in gradients for v in trained]
    arrays = [gradients[id(v)] for v, there in zip(trained, present, strict=True) if there]
    arrays += kept if layout.kept_in(part) else []
    return msgspec.msgpack.encode(KerasPushHeader(*how, present)), [as_bytes(one) for one in arrays]


def take_over(layout: KerasShardLayout, part: int, averages: Sequence[Any], body: memoryview) -> tuple[float, int]:
    """Write pulled variables into a trainer's model; the learning rate that came along, and the step that it is of."""
    variables = [*layout.variables_of(part), *averages]
    *values, rate = arrays_of(body, [*map(layout.like, variables), np.zeros(2)])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return float(rate[0]), int(rate[1])


def as_bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def arrays_of(body: memoryview, likes: Sequence[NDArray[Any]]) -> Arrays:
    """Arrays like others, over bytes that follow each other without gaps."""
    if len(body) != sum(one.nbytes for one in likes):
        raise MalformedFrame("the bytes of a gradient are not those of the model")
    found, start = [], 0
    for like in likes:
        found.append(_array(body[start : start + like.nbytes], like))
        start += like.nbytes
    return found


def _array(raw: Raw, like: NDArray[Any]) -> NDArray[Any]:
    # A copy, because the bytes may lie at any address.
    return np.array(np.frombuffer(raw, np.uint8)).view(like.dtype).reshape(like.shape)


def _blended(now: NDArray[Any], pushed: NDArray[Any], fraction: float) -> NDArray[Any]:
    """Statistics of layers move towards each trainer's by its part of a batch; counters follow the largest."""
    if now.dtype.kind in "iu":
        largest: NDArray[Any] = np.maximum(now, pushed)
        return largest
    if now.dtype.kind in "bcSU" or fraction == 1.0:
        return pushed
    before = now.astype(_exact(now))
    found: NDArray[Any] = (before + (pushed - before) * before.dtype.type(fraction)).astype(now.dtype)
    return found


def _exact(like: NDArray[Any]) -> Any:
    """Sums of half precision would lose more than they save."""
    return np.float64 if like.dtype == np.float64 else np.float32
