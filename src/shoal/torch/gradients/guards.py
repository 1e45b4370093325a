"""Guards: optimizers, schedulers and scalers whose methods do nothing for a step that does not commit.

The script calls `optimizer.step()` in every iteration, also in one whose exchange failed and which will be repeated.
Each guarded method therefore asks a `StepGate`, the trainer, first. The objects themselves stay the script's: only
methods are replaced on the instance, so that isinstance, state_dict and other wrappers keep working.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch

from shoal.errors import UnusableBackward


class StepGate(Protocol):
    """Decides what a guarded method may do now; implemented by the trainers."""

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """Handle `optimizer.step()`: call `real`, the original method, if the gradient may be applied."""

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """Handle `scaler.step(optimizer)` likewise."""

    def on_scaled(self, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Note that the next loss is multiplied by `scale`, so that it can be shown as it was before."""

    @property
    def applied(self) -> bool:
        """Whether the last `optimizer.step()` changed the parameters."""

    def scheduler_steps(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:
        """Return how many real steps one call of `scheduler.step` makes."""

    @property
    def has_gradient(self) -> bool:
        """Whether the gradient of the whole step is in place."""

    @property
    def accumulating(self) -> bool:
        """Whether gradients of the step must not be zeroed yet."""


def guard_optimizer(gate: StepGate, optimizer: torch.optim.Optimizer) -> None:
    """Let `gate` decide what `optimizer.step` and `zero_grad` do; raise UnusableBackward for unsupported ones."""
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise UnusableBackward(
            f"unsupported optimizer {type(optimizer).__name__}",
            why="it needs closures or sparse gradients, which cannot be summed over members step by step",
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


def missing_backward(what: str, has_gradients: bool) -> UnusableBackward:
    """Return the error for a step without run.backward; gradients then show that loss.backward was called instead."""
    if has_gradients:
        why = "the parameters have gradients: loss.backward() was called"
        return UnusableBackward(what, why=why, do="replace it with run.backward(loss)")
    return UnusableBackward(what, do="call run.backward(loss) for every batch, before optimizer.step()")


def refuse_step_outside_loop(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnusableBackward if a step outside the loop has gradients, which no exchange would sum; else do nothing."""
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise UnusableBackward(
            "optimizer.step was called outside the training loop",
            do="train in the loop over run.batches, or before the optimizer is attached",
        )


def guard_scheduler(gate: StepGate, scheduler: Any) -> None:
    """Let `gate` decide how far `scheduler.step` advances.

    The method is replaced in a subclass made for this instance, because every attribute of a scheduler's instance is
    part of its state_dict.
    """
    kind = type(scheduler)

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = None
        for _ in range(gate.scheduler_steps(self, *args, **kwargs)):
            result = kind.step(self, *args, **kwargs)
        return result

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})


def guard_scaler(gate: StepGate, scaler: Any) -> None:
    """Let `gate` decide what a GradScaler does; its step counts even if it skips the optimizer's because of infs."""
    real_step, real_scale = scaler.step, scaler.scale

    @functools.wraps(real_scale)
    def scale(_self: Any, outputs: Any) -> Any:
        if scaler.is_enabled():
            gate.on_scaled(real_scale)
        return real_scale(outputs)

    @functools.wraps(real_step)
    def step(_self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return gate.apply_scaled(optimizer, functools.partial(real_step, optimizer, *args, **kwargs))

    _replace(scaler, "step", step)
    _replace(scaler, "scale", scale)
    _only_if(scaler, "unscale_", lambda: gate.has_gradient)
    _only_if(scaler, "update", lambda: gate.applied)


def reset_scaler(scaler: Any) -> None:
    """Make a scaler forget that it unscaled the gradients of a discarded step, or it refuses to unscale again."""
    if scaler.is_enabled():  # a disabled one has no such record
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
