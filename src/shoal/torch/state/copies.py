"""Averages of the model's weights (EMA, SWA): attached copies that change only when a step commits.

A script calls `ema.update(model)` in every iteration, also in one that is not committed: a micro-batch that is not the
last of its step, or a step whose exchange failed and which will be repeated. An average that counts these is different
on every member. So a copy is treated like a scheduler: its update does nothing unless the last step was committed.
torch's `AveragedModel` and every copy with a method `update` or `update_parameters` are guarded. A copy that changes in
another way is checked in the first steps: if it changes and the loop body has not asked `run.committed` (or
`run.epoch_ended`), the script is refused, since no fault is needed to see the mistake.

A *copy* is an attached object whose state holds tensors of the shapes of all trained parameters of the model.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from shoal.errors import UnusableBackward

UPDATES = ("update_parameters", "update")


class CommitGate(Protocol):
    """Knows whether the last step was committed; implemented by the trainers."""

    @property
    def committed(self) -> bool: ...


class ModelCopies:
    """Attached copies of the model. `asked` is set when the script asks whether the step was committed."""

    def __init__(self, gate: CommitGate) -> None:
        self._gate = gate
        self.copies: list[Any] = []
        self._models: list[torch.nn.Module] = []
        self.asked = False
        self._before: list[list[tuple[torch.Tensor, int]]] = []

    def add(self, copy: Any, model: torch.nn.Module) -> None:
        """Guard the updates of a copy of `model`, to which it may refer."""
        self.copies.append(copy)
        self._models.append(model)
        for name in UPDATES:
            if callable(getattr(copy, name, None)):
                self._guard(copy, name)

    def _guard(self, copy: Any, name: str) -> None:
        real = getattr(copy, name)

        @functools.wraps(real)
        def update(_self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._gate.committed:
                return None
            self.asked = True
            return real(*args, **kwargs)

        setattr(copy, name, types.MethodType(update, copy))

    def begin_body(self) -> None:
        """Remember the copies as they are before the loop body runs."""
        self.asked = False
        self._before = [
            [(tensor, tensor._version) for tensor in _kept_tensors(copy, model)]
            for copy, model in zip(self.copies, self._models, strict=True)
        ]

    def check_body(self) -> None:
        """Raise UnusableBackward if the body changed a copy without asking whether the step was committed."""
        if self.asked:
            return
        for copy, model, before in zip(self.copies, self._models, self._before, strict=False):
            if _has_changed(copy, model, before):
                raise UnusableBackward(
                    f"{type(copy).__name__}, an attached copy of the model, changed without a look at run.committed",
                    why="the loop body also runs for micro-batches and for steps that are repeated; each would count",
                    do="write `if run.committed:` before the update, and call the copy in eval mode",
                )


def is_copy(part: Any, model: torch.nn.Module) -> bool:
    """Return whether the state of `part` holds a tensor of the shape of each trained parameter of the model."""
    if isinstance(part, torch.optim.Optimizer) or hasattr(part, "param_groups"):
        return False
    shapes = Counter(tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad)
    return bool(shapes) and not shapes - Counter(tuple(tensor.shape) for tensor in _tensors(part.state_dict()))


def _kept_tensors(copy: Any, model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a copy keeps; none if its state_dict makes new ones, which say nothing about a change."""
    first, second = _own_tensors(copy, model), _own_tensors(copy, model)
    return first if len(first) == len(second) and all(map(operator.is_, first, second)) else []


def _own_tensors(copy: Any, model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors of a copy without those of the model itself, to which the copy may refer."""
    shared = set(map(id, _tensors(model)))
    return [tensor for tensor in _tensors(copy) if id(tensor) not in shared]


def _has_changed(copy: Any, model: torch.nn.Module, before: list[tuple[torch.Tensor, int]]) -> bool:
    if not before:
        return False
    now = _own_tensors(copy, model)
    return len(now) != len(before) or any(
        tensor is not kept or tensor._version != version for tensor, (kept, version) in zip(now, before, strict=True)
    )


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module, of an object with a state_dict, or inside containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif hasattr(value, "state_dict"):
        yield from _tensors(value.state_dict(), depth)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)
