"""Shard store of a Keras model: a server sums the gradients of trainers, and steps each of its shards.

A step of a shard is due when the samples of a global batch have arrived, from any trainers: so the learning rate, the
number of iterations and a schedule mean the same as in the other sync modes. Each shard has an optimizer of its own
(see `shard_optimizer`), hence shards of one server may be at different steps.

Layer state (moving means, counters) travels with the first shard. It cannot be summed: moving means go towards the
value of each trainer by its part of a global batch, and counters take the largest value.
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
from shoal.keras.fit.variables import layer_state, weight_ids
from shoal.keras.modes.shard_optimizer import copy_optimizer, moving_averages
from shoal.wire.malformed import MALFORMED
from shoal.worker.parameter_server.rpc import MalformedFrame, Raw
from shoal.worker.transport.snapshot import Bytes

Read = Callable[[Any], NDArray[Any]]


class KerasPushHeader(msgspec.Struct, frozen=True, array_like=True):
    """Description of a pushed gradient: its weight, its step, and which variables of the shard are `present`.

    `rate` is the learning rate that the trainer had set at this step; None if a schedule computes it.
    """

    weight: float
    step: int
    rate: float | None
    present: list[bool]


class KerasShardLayout:
    """Assignment of a model's variables to parts; the same on every member."""

    def __init__(self, model: Any, read: Read, parts: int) -> None:
        self._read = read
        self._likes: dict[int, NDArray[Any]] = {}
        trained = list(model.trainable_variables)
        frozen = weight_ids(model) - {id(v) for v in trained}
        weights = [*trained, *(v for v in model.non_trainable_variables if id(v) in frozen)]
        sizes_bytes = [self.like(v).nbytes for v in weights]
        self.layer_state = layer_state(model)
        self.parts = {
            number: [weights[i] for i in indices]
            for number, indices in enumerate(placement.divide(sizes_bytes, parts - 1), start=1)
        }
        self.trained = {
            number: [v for v in variables if id(v) not in frozen] for number, variables in self.parts.items()
        }

    def like(self, variable: Any) -> NDArray[Any]:
        """Return an array of a variable's shape and type that takes no memory; reading the variable would copy it."""
        if id(variable) not in self._likes:
            self._likes[id(variable)] = np.broadcast_to(np.zeros((), self._read(variable).dtype), variable.shape)
        return self._likes[id(variable)]

    def layer_state_of(self, part: int) -> list[Any]:
        """Return the layer state if this part carries it, which only the first one does."""
        return self.layer_state if part == 1 else []

    def variables_of(self, part: int) -> list[Any]:
        return [*self.parts[part], *self.layer_state_of(part)]


class _KerasShardState:
    """Progress of one shard: its optimizer, its sums of gradients, and how many samples and steps they cover.

    `rate` is the newest learning rate that a trainer has sent, and `rate_step` the step it was sent with.
    """

    def __init__(self, layout: KerasShardLayout, part: int, optimizer: Any, backend: KerasBackend) -> None:
        self.trained, self._like = layout.trained[part], layout.like
        self.sums: list[NDArray[Any] | None] = [None] * len(self.trained)
        self.weight = 0.0
        self.samples = 0
        self.steps = 0
        self.rate: float | None = None
        self.rate_step = -1
        self.optimizer = copy_optimizer(optimizer, self.trained) if self.trained else None
        self._backend = backend
        self._appliers: dict[tuple[bool, ...], Callable[[Arrays], None]] = {}

    def optimizer_variables(self) -> list[Any]:
        return list(self.optimizer.variables) if self.optimizer is not None else []

    def averages(self) -> list[Any]:
        return moving_averages(self.optimizer, self.trained) if self.optimizer is not None else []

    def add(self, index: int, gradient: NDArray[Any], weight: float) -> None:
        """Add a weighted gradient of one variable."""
        dtype = _sum_dtype(gradient)
        total = self.sums[index]
        if total is None:
            self.sums[index] = gradient.astype(dtype) * dtype(weight)
        else:
            total += gradient.astype(dtype) * dtype(weight)

    def set_rate(self, rate: float | None, step: int) -> None:
        """Take the learning rate of a trainer, unless one of a later step is known."""
        if rate is not None and step >= self.rate_step:
            self.rate, self.rate_step = rate, step

    def step(self, due: int) -> None:
        """Do one optimizer step with all gradients received; it counts as `due` steps.

        That is more than one if a single ticket completes several short batches.
        """
        present = tuple(total is not None for total in self.sums)
        if self.optimizer is not None and any(present) and self.weight > 0:
            if self.rate is not None:
                self.optimizer.learning_rate = self.rate
            self.optimizer._iterations.assign(self.steps)
            gradients = [
                (total / total.dtype.type(self.weight)).astype(self._like(v).dtype, copy=False)
                for v, total in zip(self.trained, self.sums, strict=True)
                if total is not None
            ]
            self._applier(present)(gradients)
        self.sums, self.weight = [None] * len(self.trained), 0.0
        self.steps += due

    def _applier(self, present: tuple[bool, ...]) -> Callable[[Arrays], None]:
        """Return the cached function for a set of variables that have gradients; the set hardly ever changes."""
        if present not in self._appliers:
            variables = [v for v, is_present in zip(self.trained, present, strict=True) if is_present]
            self._appliers[present] = self._backend.make_applier(self.optimizer, variables)
        return self._appliers[present]


class _SavedShard(msgspec.Struct, array_like=True):
    """Fields of a shard's state that are not arrays; `present` says which of its variables have a sum."""

    weight: float
    samples: int
    steps: int
    rate: float | None
    rate_step: int
    present: list[bool]


class KerasShardStore:
    """The shards of a model on one server; implements `ShardStore`."""

    def __init__(self, backend: KerasBackend, order: SampleOrder, parts: int) -> None:
        self.layout = KerasShardLayout(backend.model, backend.read, parts)
        self._backend, self._order = backend, order
        self._lock = threading.RLock()
        self._initial_values = {part: self._values(self.layout.variables_of(part)) for part in self.layout.parts}
        self._shards = {part: self._new_shard(part) for part in self.layout.parts}

    def _new_shard(self, part: int) -> _KerasShardState:
        return _KerasShardState(self.layout, part, self._backend.optimizer, self._backend)

    def _values(self, variables: Sequence[Any]) -> Arrays:
        return [self._backend.read(v).copy() for v in variables]

    # --- gradients

    def check(self, part: int, how: bytes, body: memoryview) -> None:
        """Raise MalformedFrame if these are not the header and the arrays of a push to this part."""
        try:
            header = msgspec.msgpack.decode(how, type=KerasPushHeader)
        except MALFORMED as error:
            raise MalformedFrame(f"malformed header of a push: {error}") from error
        is_bounded = 0.0 <= header.weight < math.inf and 0 <= header.step < self._order.total_steps
        if len(header.present) != len(self._shards[part].trained) or not is_bounded:
            raise MalformedFrame("the header of a push does not fit this part")
        _check_size(body, self._likes(part, header))

    def _likes(self, part: int, header: KerasPushHeader) -> Arrays:
        """Return arrays like the gradients that are present, then like the layer state of the part."""
        trained = zip(self._shards[part].trained, header.present, strict=True)
        variables = [variable for variable, is_present in trained if is_present]
        return [self.layout.like(v) for v in (*variables, *self.layout.layer_state_of(part))]

    def apply(self, part: int, how: bytes, samples: int, fraction: float, body: memoryview) -> None:
        header = msgspec.msgpack.decode(how, type=KerasPushHeader)
        with self._lock:
            shard, state_variables = self._shards[part], self.layout.layer_state_of(part)
            indices = [index for index, is_present in enumerate(header.present) if is_present]
            likes = self._likes(part, header)
            arrays = split_arrays(body, likes)
            for index, gradient in zip(indices, arrays[: len(indices)], strict=True):
                shard.add(index, gradient, header.weight)
            for variable, pushed in zip(state_variables, arrays[len(indices) :], strict=True):
                variable.assign(_blended(self._backend.read(variable), pushed, fraction))
            shard.weight += header.weight
            shard.samples += samples
            shard.set_rate(header.rate, header.step)
            due = self._order.steps_within(shard.samples) - shard.steps
            if due > 0:
                self._step(shard, due)

    def _step(self, shard: _KerasShardState, due: int) -> None:
        try:
            shard.step(due)
        except Exception as error:
            optimizer = type(shard.optimizer).__name__
            raise UnsupportedWithServers(
                f"{optimizer} failed on a shard of the model — {type(error).__name__}: {error}",
                why="a server has only the gradients of its own variables",
                do="use an optimizer that updates each variable by itself, or --sync step",
            ) from error

    # --- reading

    def version(self, part: int) -> int:
        return self._shards[part].steps

    def parameters(self, part: int) -> list[Bytes]:
        """Return copies of a part's variables and moving averages, then its learning rate with that rate's step."""
        with self._lock:
            shard = self._shards[part]
            values = self._values([*self.layout.variables_of(part), *shard.averages()])
            rate = np.array([math.nan if shard.rate is None else shard.rate, shard.rate_step])
            return [as_bytes(array) for array in (*values, rate)]

    # --- transfer

    def capture(self, part: int) -> tuple[bytes, list[Bytes]]:
        with self._lock:
            shard = self._shards[part]
            values = self._values([*self.layout.variables_of(part), *shard.optimizer_variables()])
            sums = [total.copy() for total in shard.sums if total is not None]
            present = [total is not None for total in shard.sums]
            saved = _SavedShard(shard.weight, shard.samples, shard.steps, shard.rate, shard.rate_step, present)
            return msgspec.msgpack.encode(saved), [as_bytes(array) for array in (*values, *sums)]

    def install(self, part: int, header: bytes, buffers: Sequence[Raw]) -> None:
        saved = msgspec.msgpack.decode(header, type=_SavedShard)
        with self._lock:
            shard = self._new_shard(part)
            own, optimizer = self.layout.variables_of(part), shard.optimizer_variables()
            likes = [*map(self.layout.like, own), *map(self._backend.read, optimizer)]
            summed = [self.layout.like(v) for v, present in zip(shard.trained, saved.present, strict=True) if present]
            likes += [np.broadcast_to(np.zeros((), _sum_dtype(like)), like.shape) for like in summed]
            if [len(buffer) for buffer in buffers] != [like.nbytes for like in likes]:
                raise StateMalformed(
                    f"the state of shard {part} does not fit this model",
                    do="run the same script on every member, and resume with the script the run was started with",
                )
            values = [_array(buffer, like) for buffer, like in zip(buffers, likes, strict=True)]
            variables = [*own, *optimizer]
            for variable, value in zip(variables, values[: len(variables)], strict=True):
                variable.assign(value)
            sums = iter(values[len(variables) :])
            shard.sums = [next(sums).copy() if present else None for present in saved.present]
            shard.weight, shard.samples, shard.steps = saved.weight, saved.samples, saved.steps
            shard.rate, shard.rate_step = saved.rate, saved.rate_step
            self._shards[part] = shard

    def reset(self, part: int) -> None:
        with self._lock:
            for variable, value in zip(self.layout.variables_of(part), self._initial_values[part], strict=True):
                variable.assign(value)
            self._shards[part] = self._new_shard(part)


def encode_push(
    layout: KerasShardLayout,
    part: int,
    gradients: dict[int, NDArray[Any]],
    state: Arrays,
    header: tuple[float, int, float | None],
) -> tuple[bytes, list[Bytes]]:
    """Return a trainer's push to one part: an encoded header and the bytes of gradients and layer state.

    `gradients` are by the ids of variables; `header` is the weight, the step and the learning rate.
    """
    trained = layout.trained[part]
    present = [id(v) in gradients for v in trained]
    arrays = [gradients[id(v)] for v, is_present in zip(trained, present, strict=True) if is_present]
    arrays += state if layout.layer_state_of(part) else []
    return msgspec.msgpack.encode(KerasPushHeader(*header, present)), [as_bytes(array) for array in arrays]


def load_pulled(layout: KerasShardLayout, part: int, averages: Sequence[Any], body: memoryview) -> tuple[float, int]:
    """Assign pulled variables to a trainer's model; return the learning rate that came with them, and its step."""
    variables = [*layout.variables_of(part), *averages]
    *values, rate = split_arrays(body, [*map(layout.like, variables), np.zeros(2)])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return float(rate[0]), int(rate[1])


def as_bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _check_size(body: memoryview, likes: Sequence[NDArray[Any]]) -> None:
    expected_bytes = sum(like.nbytes for like in likes)
    if len(body) != expected_bytes:
        raise MalformedFrame(f"gradient does not fit the model — expected {expected_bytes} bytes, got {len(body)}")


def split_arrays(body: memoryview, likes: Sequence[NDArray[Any]]) -> Arrays:
    """Return contiguous bytes as arrays with the shapes and types of `likes`; raise MalformedFrame on another size."""
    _check_size(body, likes)
    arrays, start = [], 0
    for like in likes:
        arrays.append(_array(body[start : start + like.nbytes], like))
        start += like.nbytes
    return arrays


def _array(raw: Raw, like: NDArray[Any]) -> NDArray[Any]:
    # A copy, because the bytes may not be aligned.
    return np.array(np.frombuffer(raw, np.uint8)).view(like.dtype).reshape(like.shape)


def _blended(current: NDArray[Any], pushed: NDArray[Any], fraction: float) -> NDArray[Any]:
    """Return layer state moved by `fraction` towards the pushed value; of counters, the larger one."""
    if current.dtype.kind in "iu":
        largest: NDArray[Any] = np.maximum(current, pushed)
        return largest
    if current.dtype.kind in "bcSU" or fraction == 1.0:
        return pushed
    before = current.astype(_sum_dtype(current))
    blended: NDArray[Any] = (before + (pushed - before) * before.dtype.type(fraction)).astype(current.dtype)
    return blended


def _sum_dtype(like: NDArray[Any]) -> Any:
    """Return the type for sums of such arrays: at least single precision, since half precision loses too much."""
    return np.float64 if like.dtype == np.float64 else np.float32
