"""Synchronised BatchNorm: normalises over the whole global batch instead of each member's share.

Plain BatchNorm normalises each share by itself, as it would a smaller batch. These layers sum count, mean and square
over all members in the forward pass, and the gradients of these sums in the backward pass, so that the result is that
of one machine with the whole batch. Each layer costs two collectives per step, in the middle of the computation: every
member must take part, even one whose share is empty.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.torch.gradients.buckets import reduce
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.transport.exchange_broken import ExchangeBroken


class BatchNormReducer(Protocol):
    """Access to the exchange of the step in progress; implemented by the trainer."""

    def current_exchange(self) -> tuple[Exchange | None, float]:
        """Return the exchange, None outside a step, and 1.0 if this member's samples count, else 0.0."""

    def on_exchange_broken(self, broken: ExchangeBroken) -> None:
        """Report that a sum failed: the step will be repeated."""


def synchronise(module: torch.nn.Module, members: BatchNormReducer) -> torch.nn.Module:
    """Return the module with every BatchNorm layer replaced by a synchronised one; parameters and buffers are kept."""
    replacements: dict[torch.nn.Module, GlobalBatchNorm] = {}

    def replaced(layer: torch.nn.Module) -> torch.nn.Module:
        if not isinstance(layer, _BatchNorm) or isinstance(layer, GlobalBatchNorm):
            return layer
        if layer not in replacements:
            replacements[layer] = GlobalBatchNorm(layer, members)
        return replacements[layer]

    for parent in list(module.modules()):
        # Not named_children, which omits the second name of a layer that is used twice.
        for name, child in parent._modules.items():
            if child is not None:
                setattr(parent, name, replaced(child))
    return replaced(module)


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm layer whose statistics are those of the global batch."""

    def __init__(self, plain: _BatchNorm, members: BatchNormReducer) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        self.weight, self.bias = plain.weight, plain.bias
        self.running_mean, self.running_var = plain.running_mean, plain.running_var
        self.num_batches_tracked = plain.num_batches_tracked
        self.train(plain.training)
        self._members = members

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalBatchNorm:
        # A copy for evaluation or averaging belongs to the same run.
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for key, value in self.__dict__.items():
            setattr(twin, key, value if key == "_members" else copy.deepcopy(value, memo))
        return twin

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        exchange, counts = self._members.current_exchange()
        if not self.training or exchange is None or exchange.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        mean, variance, total = self._statistics_of(input, axes, exchange, counts)
        self._update_running_stats(mean, variance, total)
        shape = [1, -1] + [1] * (input.dim() - 2)
        exact = input if input.dtype == torch.float64 else input.float()
        mean, scale = mean.to(exact), torch.rsqrt(variance + self.eps).to(exact)
        out = (exact - mean.view(shape)) * scale.view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        normalised: torch.Tensor = out.to(input.dtype)
        return normalised

    def _statistics_of(
        self, input: torch.Tensor, axes: list[int], exchange: Exchange, counts: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean and variance over all members, and the number of values.

        In double precision: the variance is a small difference of large numbers if the values are far from zero.
        """
        exact = input if input.dtype == torch.float64 else input.float()
        local_variance, local_mean = (value.double() for value in torch.var_mean(exact, axes, correction=0))
        count = torch.full((1,), counts * input.numel() / input.shape[1], dtype=torch.float64, device=input.device)
        local = torch.cat([local_mean * count, (local_variance + local_mean.square()) * count, count])
        summed: torch.Tensor = _Sum.apply(local, exchange, self._members)  # type: ignore[no-untyped-call]
        sums, squares, total = torch.split(summed, [self.num_features, self.num_features, 1])
        mean = sums / total
        return mean, (squares / total - mean.square()).clamp_min(0.0), total

    def _update_running_stats(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        with torch.no_grad():
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (total / (total - 1).clamp_min(1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)


class _Sum(torch.autograd.Function):
    """Sum over members; its gradient is the sum of the members' gradients."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, exchange: Exchange, members: BatchNormReducer) -> torch.Tensor:
        ctx.exchange, ctx.members = exchange, members
        return _over_members(local, exchange, members)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _over_members(gradients[0], ctx.exchange, ctx.members), None, None


def _over_members(local: torch.Tensor, exchange: Exchange, members: BatchNormReducer) -> torch.Tensor:
    flat = local.detach().clone().contiguous()
    try:
        reduce(exchange, flat).wait()
    except ExchangeBroken as broken:
        # The step will be repeated; until then any finite number will do.
        members.on_exchange_broken(broken)
        return local.detach().clone()
    return flat
