"""Shards of a PyTorch model on a parameter server: sum pushed gradients and step with the script's own optimizer.

A step is due whenever a global batch's worth of samples has come in, from any trainers. So the learning rate, the
schedule and the number of steps mean the same as in any other mode.

Each shard counts for itself and may be at another step than its neighbours on the same server, but they share the
script's optimizer and scheduler objects. Therefore the settings of these (param_groups, scheduler state) are saved per
shard: `_load_settings` installs them before a shard steps, and `_save_settings` stores them afterwards.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from shoal.core import placement
from shoal.core.data.sample_order import SampleOrder
from shoal.errors import UnsupportedWithServers
from shoal.torch.state import capture as state
from shoal.wire.malformed import MALFORMED
from shoal.worker.parameter_server.rpc import MalformedFrame, Raw
from shoal.worker.transport.snapshot import Bytes

PER_STEP, PER_EPOCH = 1, 2


class TorchPushHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a push: which of the shard's parameters have a gradient, and the weight of the gradient.

    `schedule_unit` tells how the script steps its schedulers: 0 if not known yet, PER_STEP or PER_EPOCH.
    """

    weight: float
    schedule_unit: int
    present: list[bool]


class TorchShardLayout:
    """Assignment of a model's tensors to parts; the same on every member."""

    def __init__(self, model: torch.nn.Module, parts: int) -> None:
        self.parameters = list(model.parameters())
        self.buffers = [b for b in model.buffers() if b is not None]
        self.parts = {
            number: [self.parameters[i] for i in indices]
            for number, indices in enumerate(placement.divide([p.nbytes for p in self.parameters], parts - 1), start=1)
        }

    def buffers_of(self, part: int) -> list[torch.Tensor]:
        """Return the buffers of a part; all of them belong to the first shard."""
        return self.buffers if part == 1 else []

    def tensors_of(self, part: int) -> list[torch.Tensor]:
        """Return the parameters and buffers of a part."""
        return [*(p.detach() for p in self.parts[part]), *(b.detach() for b in self.buffers_of(part))]


class _TorchShardState:
    """Progress of one shard, and the settings of its optimizers and schedulers.

    `sums` and `weight` accumulate gradients since the last step, `samples` counts all samples so far, and
    `scheduler_steps` is how often the schedulers have stepped.
    """

    def __init__(self) -> None:
        self.sums: list[torch.Tensor | None] = []
        self.weight = 0.0
        self.samples = 0
        self.steps = 0
        self.scheduler_steps = 0
        self.schedule_unit = 0
        self.groups: list[list[dict[str, Any]]] = []
        self.schedules: list[Any] = []


class TorchShardStore:
    """Shards of a model on one server; see `worker.parameter_server.parts.ShardStore`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        order: SampleOrder,
        parts: int,
    ) -> None:
        self.layout = TorchShardLayout(model, parts)
        self._optimizers, self._schedulers, self._order = optimizers, schedulers, order
        self._lock = threading.RLock()
        self._groups = _settings_of(optimizers)
        self._schedules = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        self._shards = {part: self._new_shard(part) for part in self.layout.parts}
        self._initial = {part: [t.clone() for t in self.layout.tensors_of(part)] for part in self.layout.parts}

    def _new_shard(self, part: int) -> _TorchShardState:
        shard = _TorchShardState()
        shard.sums = [None] * len(self.layout.parts[part])
        shard.groups, shard.schedules = copy.deepcopy(self._groups), copy.deepcopy(self._schedules)
        return shard

    # --- gradients

    def check(self, part: int, how: bytes, body: memoryview) -> None:
        """Raise MalformedFrame if these are not the header and the tensors of a push to this part."""
        try:
            header = msgspec.msgpack.decode(how, type=TorchPushHeader)
        except MALFORMED as error:
            raise MalformedFrame(f"malformed header of a push: {error}") from error
        parameters = self.layout.parts[part]
        if len(header.present) != len(parameters) or not 0.0 <= header.weight < math.inf:
            raise MalformedFrame("the header of a push does not fit this part")
        with_gradient = [p for p, present in zip(parameters, header.present, strict=True) if present]
        _check_size(body, [*with_gradient, *self.layout.buffers_of(part)])

    def apply(self, part: int, how: bytes, samples: int, fraction: float, body: memoryview) -> None:
        """Add the gradient of a ticket to the shard; step if it completes a global batch."""
        header = msgspec.msgpack.decode(how, type=TorchPushHeader)
        parameters, buffers = self.layout.parts[part], self.layout.buffers_of(part)
        with_gradient = [p for p, present in zip(parameters, header.present, strict=True) if present]
        tensors = iter(_decode_tensors(body, [*with_gradient, *buffers]))
        with self._lock, torch.no_grad():
            shard = self._shards[part]
            for index, present in enumerate(header.present):
                if present:
                    _add(shard, index, next(tensors), header.weight)
            for buffer, pushed in zip(buffers, tensors, strict=True):
                _blend(buffer, pushed, fraction)
            shard.weight += header.weight
            shard.samples += samples
            shard.schedule_unit = header.schedule_unit or shard.schedule_unit
            due = self._order.steps_within(shard.samples) - shard.steps
            if due > 0:
                self._step(part, shard, due)

    def _step(self, part: int, shard: _TorchShardState, due: int) -> None:
        """Step once with the mean of all pushed gradients; a ticket that completes two short batches counts as both."""
        parameters = self.layout.parts[part]
        self._load_settings(shard)
        self._advance_schedulers(shard)
        for parameter, total in zip(parameters, shard.sums, strict=True):
            if total is not None and shard.weight > 0:
                parameter.grad = (total / shard.weight).to(parameter.dtype)
        for optimizer in self._optimizers:
            _step_with(optimizer)
        for parameter in parameters:
            parameter.grad = None
        shard.sums, shard.weight = [None] * len(parameters), 0.0
        shard.steps += due
        self._advance_schedulers(shard)
        self._save_settings(shard)

    def _advance_schedulers(self, shard: _TorchShardState) -> None:
        """Step the schedulers to where the shard's steps or epochs put them, once the unit is known."""
        epochs = shard.steps // self._order.steps_per_epoch
        target = {PER_STEP: shard.steps, PER_EPOCH: epochs}.get(shard.schedule_unit, shard.scheduler_steps)
        for _ in range(target - shard.scheduler_steps):
            for scheduler in self._schedulers:
                scheduler.step()
        shard.scheduler_steps = max(shard.scheduler_steps, target)

    def _load_settings(self, shard: _TorchShardState) -> None:
        for optimizer, groups in zip(self._optimizers, shard.groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        for scheduler, saved in zip(self._schedulers, shard.schedules, strict=True):
            scheduler.load_state_dict(copy.deepcopy(saved))

    def _save_settings(self, shard: _TorchShardState) -> None:
        shard.groups = _settings_of(self._optimizers)
        shard.schedules = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]

    # --- reading

    def version(self, part: int) -> int:
        """Return how many steps a part has made."""
        return self._shards[part].steps

    def parameters(self, part: int) -> list[Bytes]:
        """Return copies of a part's parameters and buffers."""
        with self._lock:
            return [data.copy() for data in state.as_bytes(self.layout.tensors_of(part))]

    def steps(self) -> int:
        """Return how many steps all shards of this server have made."""
        return min((shard.steps for shard in self._shards.values()), default=0)

    # --- replication

    def capture(self, part: int) -> tuple[bytes, list[Bytes]]:
        """Return a header and copies of everything in a part, including optimizer state."""
        with self._lock:
            header, tensors = state.capture({"shard": _StateDictHolder(self._saved(part))})
            return header, state.as_bytes(tensors)

    def install(self, part: int, header: bytes, buffers: Sequence[Raw]) -> None:
        """Replace everything in a part by what `capture` returned elsewhere."""
        saved = state.read(header, [np.frombuffer(buffer, np.uint8) for buffer in buffers])["shard"]
        with self._lock, torch.no_grad():
            for tensor, value in zip(self.layout.tensors_of(part), saved["tensors"], strict=True):
                tensor.copy_(value)
            for parameter, states in zip(self.layout.parts[part], saved["optimizers"], strict=True):
                for optimizer, values in zip(self._optimizers, states, strict=True):
                    optimizer.state.pop(parameter, None)
                    if values:
                        optimizer.state[parameter] = _cloned(values)
            shard = self._shards[part] = _TorchShardState()
            shard.sums = [None if total is None else total.clone() for total in saved["sums"]]
            shard.groups, shard.schedules = saved["groups"], saved["schedules"]
            shard.weight, shard.samples, shard.steps = saved["weight"], saved["samples"], saved["steps"]
            shard.scheduler_steps, shard.schedule_unit = saved["scheduler_steps"], saved["schedule_unit"]

    def reset(self, part: int) -> None:
        """Reset a part to the values the script initialised it with."""
        with self._lock, torch.no_grad():
            for tensor, initial in zip(self.layout.tensors_of(part), self._initial[part], strict=True):
                tensor.copy_(initial)
            for parameter in self.layout.parts[part]:
                for optimizer in self._optimizers:
                    optimizer.state.pop(parameter, None)
            self._shards[part] = self._new_shard(part)

    def _saved(self, part: int) -> dict[str, Any]:
        shard = self._shards[part]
        return {
            "tensors": [t.clone() for t in self.layout.tensors_of(part)],
            "optimizers": [
                [dict(optimizer.state.get(p) or {}) for optimizer in self._optimizers] for p in self.layout.parts[part]
            ],
            "sums": list(shard.sums),
            "groups": shard.groups,
            "schedules": shard.schedules,
            "weight": shard.weight,
            "samples": shard.samples,
            "steps": shard.steps,
            "scheduler_steps": shard.scheduler_steps,
            "schedule_unit": shard.schedule_unit,
        }


class _StateDictHolder:
    """Wrapper that gives a dict the interface of a `Stateful`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return self._values

    def load_state_dict(self, saved: Any) -> None:
        """Do nothing: the dict is only captured."""


def _step_with(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:
        raise UnsupportedWithServers(
            f"{type(optimizer).__name__} cannot step with a part of the model: {type(error).__name__}: {error}",
            why="a server has gradients of its own parameters only; those of all others are None",
            do="use an optimizer that skips parameters without a gradient, or --sync step",
        ) from error


def encode_push(layout: TorchShardLayout, part: int, weight: float, schedule_unit: int) -> tuple[bytes, list[Bytes]]:
    """Return the header and the bytes that a trainer pushes to one part: gradients, then buffers."""
    parameters = layout.parts[part]
    present = [p.grad is not None for p in parameters]
    tensors = [p.grad.to(p.dtype) for p in parameters if p.grad is not None]
    tensors += [b.detach() for b in layout.buffers_of(part)]
    return msgspec.msgpack.encode(TorchPushHeader(weight, schedule_unit, present)), state.as_bytes(tensors)


def load_part(layout: TorchShardLayout, part: int, body: memoryview) -> None:
    """Write pulled parameters into a trainer's model."""
    tensors = layout.tensors_of(part)
    with torch.no_grad():
        for tensor, value in zip(tensors, _decode_tensors(body, tensors), strict=True):
            tensor.copy_(value)


def _check_size(body: memoryview, like: Sequence[torch.Tensor]) -> None:
    expected = sum(tensor.nbytes for tensor in like)
    if len(body) != expected:
        raise MalformedFrame(f"the tensors of a part have {expected} bytes, but {len(body)} arrived")


def _decode_tensors(body: memoryview, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the shapes in `like` from bytes without gaps; raise MalformedFrame if the sizes differ."""
    _check_size(body, like)
    tensors, start = [], 0
    for tensor in like:
        data = body[start : start + tensor.nbytes]
        start += tensor.nbytes
        if tensor.numel() == 0:
            tensors.append(torch.empty_like(tensor, device="cpu"))
            continue
        # Copied, because the bytes may not be aligned.
        raw = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        tensors.append(raw.view(tensor.dtype).view(tensor.shape))
    return tensors


def _add(shard: _TorchShardState, index: int, gradient: torch.Tensor, weight: float) -> None:
    total = shard.sums[index]
    if total is None:
        exact = gradient.dtype if gradient.dtype == torch.float64 else torch.float32
        shard.sums[index] = gradient.to(exact) * weight
    else:
        total.add_(gradient, alpha=weight)


def _blend(buffer: torch.Tensor, pushed: torch.Tensor, fraction: float) -> None:
    """Move running statistics towards the trainer's by its fraction of a batch; keep the largest of counters."""
    if buffer.is_floating_point():
        buffer.lerp_(pushed.to(buffer), fraction)
    elif buffer.is_complex() or buffer.dtype == torch.bool:
        buffer.copy_(pushed)
    else:
        torch.maximum(buffer, pushed.to(buffer), out=buffer)


def _settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[dict[str, Any]]]:
    return [
        [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in o.param_groups]
        for o in optimizers
    ]


def _cloned(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
