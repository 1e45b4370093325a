"""Gradients travel in buckets while the backward pass is still computing the rest.

A bucket is one flat tensor. When the last gradient of a bucket has been computed, its sum over all members begins;
buckets begin in one fixed order, so all members exchange the same thing at the same time. After the exchange the
parameters' gradients are views of the buckets: no second copy is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from shoal.errors import UnusableBackward
from shoal.torch.gradients.gradient_norms import TorchGradientNorms
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.collectives.exchange import Adder, Exchange, Work

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


class StepAborted(Exception):  # noqa: N818 - it only leaves the backward pass of a step that will be done again
    """The world fell apart during the backward pass."""


class Bucket:
    """Some parameters' gradients, one after the other, and perhaps a tail of other numbers."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], tail: int, like: torch.Tensor) -> None:
        self.parameters = list(parameters)
        counts = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(counts) + tail, dtype=like.dtype, device=like.device)
        pieces = torch.split(self.flat, [*counts, tail])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=False)]
        self.tail = pieces[-1]
        self.missing = len(self.parameters)


class Buckets:
    """The gradients of a model, in the order in which the backward pass gives them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], statistics: int) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        tail = len(self.parameters) + statistics
        self._buckets = _lay_out(list(reversed(self.parameters)), tail)
        last = self._buckets[-1]
        # Which parameters anybody used, then statistics that are averaged along with the gradients.
        self._used, self.statistics = last.tail[: len(self.parameters)], last.tail[len(self.parameters) :]
        self._place = {p: (b, i) for b in self._buckets for i, p in enumerate(b.parameters)}
        self._number = {p: n for n, p in enumerate(self.parameters)}
        self._seen: set[torch.nn.Parameter] = set()
        self._exchange: Exchange | None = None
        self._tickets: list[Work] = []
        self._next = 0
        self.squares: TorchGradientNorms | None = None
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self.parameters]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def fits(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the same parameters are trained as when the buckets were made."""
        trained = [p for p in parameters if p.requires_grad]
        return len(trained) == len(self.parameters) and all(map(_is, trained, self.parameters))

    def refuse_others(self) -> None:
        """Raise if there are gradients that we have not handed out: they would count once for each member."""
        for bucket in self._buckets:
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                    raise UnusableBackward(
                        "parameters have gradients before run.backward",
                        why="gradients that a script computes by itself are not summed over members",
                        do="add the losses and call run.backward once, or optimizer.zero_grad() before it",
                    )

    def arm(self, exchange: Exchange) -> None:
        """From now on, each gradient that is complete is sent on its way."""
        self._exchange = exchange
        self._tickets = []
        self._seen.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def disarm(self) -> None:
        self._exchange = None

    def zero_buffers(self) -> list[ZeroBuffer]:
        """Buffers like ours, for a shadow that takes part without gradients."""
        return [(*operand(torch.zeros_like(bucket.flat)), None) for bucket in self._buckets]

    def finish(self, divisor: float, empty: bool) -> None:
        """Send what is left, wait for all, and give every parameter its gradient over the whole global batch.

        `empty` says that this member's share is empty, so that whatever it computed counts for nothing.
        """
        assert self._exchange is not None
        if empty:
            self._blank()
        while self._next < len(self._buckets):
            self._fill_gaps(self._buckets[self._next])
            self._launch()
        for ticket in self._tickets:
            ticket.wait()
        self._exchange = None
        if divisor != 1.0:
            for bucket in self._buckets:
                for view in bucket.views:
                    view.div_(divisor)
        if self.squares is not None:
            for bucket in self._buckets:
                for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                    self.squares.everybody(parameter, view)
        self._hand_out()

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        if self._exchange is None:
            return
        self._check_arrival(parameter)
        bucket, index = self._place[parameter]
        self._take(bucket, index, parameter)
        bucket.missing -= 1
        while self._next < len(self._buckets) - 1 and self._buckets[self._next].missing == 0:
            self._launch()

    def _check_arrival(self, parameter: torch.nn.Parameter) -> None:
        """Raise if this gradient cannot count: it was here before, or the world has fallen apart."""
        if parameter in self._seen:
            raise UnusableBackward(
                "a parameter's gradient was completed twice in one backward pass",
                why="reentrant activation checkpointing, or a second backward in the same step",
                do="use torch.utils.checkpoint with use_reentrant=False, and call run.backward once a step",
            )
        broken = getattr(self._exchange, "broken", None)
        if broken is not None:
            raise StepAborted from broken

    def _take(self, bucket: Bucket, index: int, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        bucket.views[index].copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = None if gradient.is_sparse else bucket.views[index]
        self._seen.add(parameter)

    def _blank(self) -> None:
        for bucket in self._buckets[self._next :]:
            bucket.flat[: bucket.flat.numel() - bucket.tail.numel()].zero_()
        for parameter in self.parameters:
            parameter.grad = None
        self._seen.clear()

    def _fill_gaps(self, bucket: Bucket) -> None:
        """Parameters that this member's share did not use have no gradient here, but may have one elsewhere."""
        if bucket.missing:
            for index, parameter in enumerate(bucket.parameters):
                if parameter in self._seen:
                    continue
                if parameter.grad is not None:
                    # Of pieces before the last one, which did not use it.
                    self._take(bucket, index, parameter)
                else:
                    bucket.views[index].zero_()
        if bucket is self._buckets[-1]:
            self._used.zero_()
            used = [self._number[p] for p in self._seen]
            if len(used) == len(self.parameters):
                self._used.fill_(1.0)
            elif used:
                self._used[used] = 1.0

    def _launch(self) -> None:
        assert self._exchange is not None
        bucket = self._buckets[self._next]
        if self.squares is not None:
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                self.squares.own(parameter, view)
        flat = bucket.flat
        self._next += 1
        self._tickets.append(reduce(self._exchange, flat))

    def _hand_out(self) -> None:
        nobody_used = (self._used == 0).tolist()
        for bucket in self._buckets:
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                parameter.grad = None if nobody_used[self._number[parameter]] else view


def reduce(exchange: Exchange, flat: torch.Tensor) -> Work:
    """Sum a flat tensor over all members in place."""
    if getattr(exchange, "takes_tensors", False):
        return exchange.reduce(flat)  # type: ignore[arg-type]
    return exchange.reduce(*operand(flat))


def operand(flat: torch.Tensor) -> tuple[NDArray[Any], Adder | None]:
    """A flat tensor as the exchange sums it: NumPy's view of its memory, and how to add what NumPy cannot."""
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.uint16).numpy(), _add_bfloat16
    return flat.numpy(), None


def _add_bfloat16(into: Any, more: Any) -> None:
    torch.from_numpy(into).view(torch.bfloat16).add_(torch.from_numpy(more).view(torch.bfloat16))


def _lay_out(parameters: Sequence[torch.nn.Parameter], tail: int) -> list[Bucket]:
    """Buckets of one type and device each; the last one, in float32, carries the tail."""
    groups: list[list[torch.nn.Parameter]] = []
    room = 0.0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not groups or room <= 0 or not _alike(parameter, groups[-1][0]):
            room = FIRST_BYTES if not groups else BUCKET_BYTES
            groups.append([])
        groups[-1].append(parameter)
        room -= size
    tail_fits = bool(groups) and groups[-1][0].dtype == torch.float32
    buckets = [
        Bucket(group, tail if tail_fits and group is groups[-1] else 0, like=group[0].detach()) for group in groups
    ]
    if not tail_fits:
        device = parameters[0].device if parameters else torch.device("cpu")
        buckets.append(Bucket([], tail, like=torch.empty(0, dtype=torch.float32, device=device)))
    return buckets


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device


def _is(one: object, other: object) -> bool:
    return one is other
