"""Retry after out-of-memory: the member repeats the step in smaller micro-batches.

The error is raised in the middle of the script's loop body, which must not notice it. So a forward pass that does not
fit returns a stand-in of the right shape: the model's output for the first samples, repeated. The body runs to its end
with it, the step is discarded, and the same samples are given out again in micro-batches of half the size.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from shoal.worker.training.loop import mentions_out_of_memory

# BatchNorm refuses to train on a single sample.
PROBE_SAMPLES = 2


class OomHandler(Protocol):
    """Callbacks for a micro-batch that does not fit into memory; implemented by the trainers."""

    @property
    def micro_batch_samples(self) -> int:
        """Samples of the micro-batch that is being computed; 0 outside a step."""
        ...

    def on_out_of_memory(self, error: BaseException) -> None:
        """Repeat the step with smaller micro-batches; raise the error if they cannot get smaller."""
        ...


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether smaller micro-batches may help."""
    return isinstance(error, torch.OutOfMemoryError) or mentions_out_of_memory(error)


def guard_model(handler: OomHandler, model: torch.nn.Module) -> None:
    """Make forward passes of training steps return a stand-in instead of raising when memory runs out."""
    # A compiled module has its forward on the instance; others on the class, where copies and pickles find it.
    compiled = model.__dict__.get("forward")
    plain = type(model).forward

    @functools.wraps(plain)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        real = compiled or functools.partial(plain, self)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not handler.micro_batch_samples:
            return real(*args, **kwargs)
        try:
            return real(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            samples = handler.micro_batch_samples
            handler.on_out_of_memory(error)
            error.__traceback__ = None  # its frames hold the activations computed so far
            return _stand_in(real, samples, min(PROBE_SAMPLES, samples), args, kwargs)

    model.forward = types.MethodType(forward, model)


def _stand_in(real: Callable[..., Any], samples: int, few: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the model's output for the first few samples, repeated for all of them."""

    def first(value: Any) -> Any:
        return value[:few] if _is_batch(value, samples) else value

    def repeated(value: Any) -> Any:
        return value[:1].expand(samples, *value.shape[1:]) if _is_batch(value, few) else value

    try:
        with torch.no_grad():
            output = real(*_mapped(args, first), **_mapped(kwargs, first))
    except (MemoryError, RuntimeError) as error:
        if few == 1 or not is_out_of_memory(error):
            raise
        return _stand_in(real, samples, 1, args, kwargs)
    return _mapped(_mapped(output, repeated), _differentiable)


def _is_batch(value: Any, samples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == samples


def _differentiable(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        mapped = {key: _mapped(item, function) for key, item in value.items()}
        return mapped if type(value) is dict else cast(Any, type(value))(**mapped)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)
