"""What a server does with gradients: it sums them up, and steps with the user's own optimizer, shard by shard.

A step is due whenever a global batch's worth of samples has come in, whoever computed them: so the learning rate, the
schedule and the number of steps mean what they mean in any other mode. Each shard counts for itself. The optimizer's
and the schedulers' settings are put in place before a shard steps and taken away after it, so that shards on one server
may be at different steps.
"""

from __future__ import annotations

import copy
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
from shoal.worker.parameter_server.rpc import MalformedFrame, Raw
from shoal.worker.transport.snapshot import Bytes

PER_STEP, PER_EPOCH = 1, 2


class TorchPushHeader(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a push are: which of the shard's parameters have a gradient, and what it counts for.

    `pace` says how the script calls its schedulers: not known yet, every step, or every epoch.
    """

    weight: float
    pace: int
    present: list[bool]


class TorchShardLayout:
    """Which tensors of a model are in which part; the same on every member."""

    def __init__(self, model: torch.nn.Module, parts: int) -> None:
        self.parameters = list(model.parameters())
        self.buffers = [b for b in model.buffers() if b is not None]
        self.parts = {
            number: [self.parameters[i] for i in indices]
            for number, indices in enumerate(placement.divide([p.nbytes for p in self.parameters], parts - 1), start=1)
        }

    def buffers_of(self, part: int) -> list[torch.Tensor]:
        """The first shard carries the buffers along."""
        return self.buffers if part == 1 else []

    def tensors_of(self, part: int) -> list[torch.Tensor]:
        return [*(p.detach() for p in self.parts[part]), *(b.detach() for b in self.buffers_of(part))]


class _TorchShardState:
    """How far one shard is, and what its optimizers and schedulers are set to."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor | None] = []
        self.weight = 0.0
        self.samples = 0
        self.steps = 0
        self.scheduled = 0
        self.pace = 0
        self.groups: list[list[dict[str, Any]]] = []
        self.schedules: list[Any] = []


class TorchShardStore:
    """The shards of a model on one server."""

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
        self._lanes = {part: self._new_lane(part) for part in self.layout.parts}
        self._built = {part: [t.clone() for t in self.layout.tensors_of(part)] for part in self.layout.parts}

    def _new_lane(self, part: int) -> _TorchShardState:
        lane = _TorchShardState()
        lane.sums = [None] * len(self.layout.parts[part])
        lane.groups, lane.schedules = copy.deepcopy(self._groups), copy.deepcopy(self._schedules)
        return lane

    # --- gradients

    def apply(self, part: int, how: bytes, samples: int, body: memoryview) -> None:
        told = msgspec.msgpack.decode(how, type=TorchPushHeader)
        parameters, buffers = self.layout.parts[part], self.layout.buffers_of(part)
        wanted = [p for p, present in zip(parameters, told.present, strict=True) if present]
        pieces = _tensors(body, [*wanted, *buffers])
        with self._lock, torch.no_grad():
            lane = self._lanes[part]
            gradients = iter(pieces)
            for index, present in enumerate(told.present):
                if present:
                    _add(lane, index, next(gradients), told.weight)
            fraction = min(1.0, samples / self._order.size)
            for buffer, pushed in zip(buffers, gradients, strict=True):
                _blend(buffer, pushed, fraction)
            lane.weight += told.weight
            lane.samples += samples
            lane.pace = told.pace or lane.pace
            due = self._order.steps_within(lane.samples) - lane.steps
            if due > 0:
                self._step(part, lane, due)

    def _step(self, part: int, lane: _TorchShardState, due: int) -> None:
        """One step with all that has come in; a ticket that completes two short batches counts as both."""
        parameters = self.layout.parts[part]
        self._put_in_place(lane)
        self._schedule(lane)
        for parameter, total in zip(parameters, lane.sums, strict=True):
            if total is not None and lane.weight > 0:
                parameter.grad = (total / lane.weight).to(parameter.dtype)
        for optimizer in self._optimizers:
            _step_with(optimizer)
        for parameter in parameters:
            parameter.grad = None
        lane.sums, lane.weight = [None] * len(parameters), 0.0
        lane.steps += due
        self._schedule(lane)
        self._take_away(lane)

    def _schedule(self, lane: _TorchShardState) -> None:
        epochs = lane.steps // self._order.steps_per_epoch
        target = lane.steps if lane.pace == PER_STEP else epochs if lane.pace == PER_EPOCH else lane.scheduled
        for _ in range(target - lane.scheduled):
            for scheduler in self._schedulers:
                scheduler.step()
        lane.scheduled = max(lane.scheduled, target)

    def _put_in_place(self, lane: _TorchShardState) -> None:
        for optimizer, groups in zip(self._optimizers, lane.groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        for scheduler, saved in zip(self._schedulers, lane.schedules, strict=True):
            scheduler.load_state_dict(copy.deepcopy(saved))

    def _take_away(self, lane: _TorchShardState) -> None:
        lane.groups = _settings_of(self._optimizers)
        lane.schedules = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]

    # --- reading

    def version(self, part: int) -> int:
        return self._lanes[part].steps

    def parameters(self, part: int) -> list[Bytes]:
        with self._lock:
            return [each.copy() for each in state.as_bytes(self.layout.tensors_of(part))]

    def steps(self) -> int:
        """How many steps all shards here have made."""
        return min((lane.steps for lane in self._lanes.values()), default=0)

    # --- handing over

    def capture(self, part: int) -> tuple[bytes, list[Bytes]]:
        with self._lock:
            header, tensors = state.capture({"shard": _StateDictHolder(self._saved(part))})
            return header, state.as_bytes(tensors)

    def install(self, part: int, header: bytes, buffers: Sequence[Raw]) -> None:
        saved = state.read(header, [np.frombuffer(buffer, np.uint8) for buffer in buffers])["shard"]
        with self._lock, torch.no_grad():
            for tensor, value in zip(self.layout.tensors_of(part), saved["tensors"], strict=True):
                tensor.copy_(value)
            for parameter, held in zip(self.layout.parts[part], saved["optimizers"], strict=True):
                for optimizer, kept in zip(self._optimizers, held, strict=True):
                    optimizer.state.pop(parameter, None)
                    if kept:
                        optimizer.state[parameter] = _cloned(kept)
            lane = self._lanes[part] = _TorchShardState()
            lane.sums = [None if each is None else each.clone() for each in saved["sums"]]
            lane.groups, lane.schedules = saved["groups"], saved["schedules"]
            lane.weight, lane.samples, lane.steps = saved["weight"], saved["samples"], saved["steps"]
            lane.scheduled, lane.pace = saved["scheduled"], saved["pace"]

    def reset(self, part: int) -> None:
        with self._lock, torch.no_grad():
            for tensor, built in zip(self.layout.tensors_of(part), self._built[part], strict=True):
                tensor.copy_(built)
            for parameter in self.layout.parts[part]:
                for optimizer in self._optimizers:
                    optimizer.state.pop(parameter, None)
            self._lanes[part] = self._new_lane(part)

    def _saved(self, part: int) -> dict[str, Any]:
        lane = self._lanes[part]
        return {
            "tensors": [t.clone() for t in self.layout.tensors_of(part)],
            "optimizers": [
                [dict(optimizer.state.get(p) or {}) for optimizer in self._optimizers] for p in self.layout.parts[part]
            ],
            "sums": list(lane.sums),
            "groups": lane.groups,
            "schedules": lane.schedules,
            "weight": lane.weight,
            "samples": lane.samples,
            "steps": lane.steps,
            "scheduled": lane.scheduled,
            "pace": lane.pace,
        }


class _StateDictHolder:
    """A dict as a part of a state."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return self._values

    def load_state_dict(self, saved: Any) -> None:
        """It is read, never loaded."""


def _step_with(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:
        raise UnsupportedWithServers(
            f"{type(optimizer).__name__} cannot step with a part of the model: {type(error).__name__}: {error}",
            why="servers have the gradients of their own parameters only; those of all others are None",
            do="use an optimizer that passes over parameters without a gradient, or --sync step",
        ) from error


def gradients_of(layout: TorchShardLayout, part: int, weight: float, pace: int) -> tuple[bytes, list[Bytes]]:
    """What a trainer pushes of its gradient to one part."""
    parameters = layout.parts[part]
    present = [p.grad is not None for p in parameters]
    tensors = [p.grad.to(p.dtype) for p in parameters if p.grad is not None]
    tensors += [b.detach() for b in layout.buffers_of(part)]
    return msgspec.msgpack.encode(TorchPushHeader(weight, pace, present)), state.as_bytes(tensors)


def take_over(layout: TorchShardLayout, part: int, body: memoryview) -> None:
    """Write pulled parameters into a trainer's model."""
    tensors = layout.tensors_of(part)
    with torch.no_grad():
        for tensor, value in zip(tensors, _tensors(body, tensors), strict=True):
            tensor.copy_(value)


def _tensors(body: memoryview, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors over bytes that follow each other without gaps."""
    if len(body) != sum(tensor.nbytes for tensor in like):
        raise MalformedFrame("the bytes of a gradient are not those of the model")
    found, start = [], 0
    for tensor in like:
        piece = body[start : start + tensor.nbytes]
        start += tensor.nbytes
        if tensor.numel() == 0:
            found.append(torch.empty_like(tensor, device="cpu"))
            continue
        # A copy, because the bytes may lie at any address.
        raw = torch.from_numpy(np.frombuffer(piece, np.uint8).copy())
        found.append(raw.view(tensor.dtype).view(tensor.shape))
    return found


def _add(lane: _TorchShardState, index: int, gradient: torch.Tensor, weight: float) -> None:
    known = lane.sums[index]
    if known is None:
        exact = gradient.dtype if gradient.dtype == torch.float64 else torch.float32
        lane.sums[index] = gradient.to(exact) * weight
    else:
        known.add_(gradient, alpha=weight)


def _blend(buffer: torch.Tensor, pushed: torch.Tensor, fraction: float) -> None:
    """Running statistics move towards each trainer's by its part of a batch; counters follow the largest."""
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


def _cloned(kept: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in kept.items()}
