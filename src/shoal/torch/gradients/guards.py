"""Optimizers, schedulers and scalers that do nothing for a step that did not commit.

The objects stay what they are; only their methods are replaced on the instance, so that isinstance, state_dict and
whatever else wraps them keep working.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from shoal.errors import NotAttached, UnusableBackward


class StepGate(Protocol):
    """Says what may happen now; the run."""

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any: ...

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any: ...

    @property
    def applied(self) -> bool: ...

    def schedules(self, scheduler: Any, *args: Any, **kwargs: Any) -> int: ...

    @property
    def has_gradient(self) -> bool: ...

    @property
    def accumulating(self) -> bool: ...


def guard_optimizer(gate: StepGate, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise UnusableBackward(
            f"{type(optimizer).__name__} cannot be used",
            why="it needs closures or sparse gradients, and neither can be summed over members step by step",
            do="use another optimizer, such as AdamW",
        )
    real_step, real_zero = optimizer.step, optimizer.zero_grad

    @functools.wraps(real_step)
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise UnusableBackward(
                "optimizer.step was given a closure",
                why="it would evaluate the model again inside the step",
                do="call run.backward(loss) and then optimizer.step()",
            )
        return gate.apply(self, real_step)

    @functools.wraps(real_zero)
    def zero_grad(_self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if not gate.accumulating:
            real_zero(set_to_none=set_to_none)

    _replace(optimizer, "step", step)
    _replace(optimizer, "zero_grad", zero_grad)


def refuse_strangers(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise if what is trained is not of the model, or not there yet: nobody would sum it up or hand it over."""
    if any(map(torch.nn.parameter.is_lazy, [*model.parameters(), *model.buffers()])):
        raise NotAttached(
            "the model has lazy layers that have seen no data yet",
            why="every member would begin with parameters of its own",
            do="call the model with a sample before run.attach, on every member",
        )
    known = set(map(id, model.parameters()))
    for optimizer in optimizers:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        strange = [tuple(p.shape) for p in trained if p.requires_grad and id(p) not in known]
        if strange:
            raise NotAttached(
                f"{type(optimizer).__name__} trains {len(strange)} parameters that are not of the attached model",
                why=f"members would each train their own; the first one has shape {strange[0]}",
                do="put all that is trained into one torch.nn.Module, and attach that",
            )


def outside(optimizer: torch.optim.Optimizer) -> None:
    """A step outside the training loop: nothing to do without gradients, and nobody to sum them otherwise."""
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise UnusableBackward(
            "optimizer.step was called outside the training loop",
            do="train in the loop over run.batches, or before the optimizer is attached",
        )


def guard_scheduler(gate: StepGate, scheduler: Any) -> None:
    """In a class of its own, because every attribute of the instance is part of a scheduler's state_dict.

    Where the global batch is chosen, a scheduler that is stepped at every step advances by the progress that was made;
    one that is stepped more rarely, such as at the end of epochs, as often as it is.
    """
    kind = type(scheduler)

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = None
        for _ in range(gate.schedules(self, *args, **kwargs)):
            result = kind.step(self, *args, **kwargs)
        return result

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})


def guard_scaler(gate: StepGate, scaler: Any) -> None:
    """A scaler's step counts as the optimizer's, even if it finds infinities and skips that."""
    real_step = scaler.step

    @functools.wraps(real_step)
    def step(_self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return gate.apply_scaled(optimizer, functools.partial(real_step, optimizer, *args, **kwargs))

    _replace(scaler, "step", step)
    _only_if(scaler, "unscale_", lambda: gate.has_gradient)
    _only_if(scaler, "update", lambda: gate.applied)


def forget_gradients(scaler: Any) -> None:
    """Let a scaler forget that it has unscaled gradients that are gone: it would refuse to unscale the next ones."""
    scaler._per_optimizer_states.clear()


def _only_if(target: Any, name: str, allowed: Callable[[], bool]) -> None:
    real = getattr(target, name)

    @functools.wraps(real)
    def method(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) if allowed() else None

    _replace(target, name, method)


def _replace(target: Any, name: str, function: Callable[..., Any]) -> None:
    # A bound method, because schedulers look for __func__ when they count steps.
    setattr(target, name, types.MethodType(function, target))
