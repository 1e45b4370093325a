"""Gradient buckets: all-reduce the gradients of a model while the backward pass still computes the rest.

Theory of operation. A bucket is one flat tensor that holds the gradients of several parameters side by side. One
all-reduce per parameter would cost thousands of messages, and one all-reduce of everything could start only when the
backward pass is over; buckets of some megabytes are large enough to be fast and small enough to overlap.

*Order.* The backward pass computes gradients roughly in the reverse order of `model.parameters()`, so the parameters
are laid out in that order. The first bucket is small, so that the exchange starts early. Members may see gradients in
different orders, but collectives match by position: bucket k of one member is added to bucket k of every other. So a
complete bucket is sent only once all buckets before it were sent, on every member. The last bucket is never sent from
inside the backward pass: its tail is known only afterwards.

*One step.*

1. `arm` gives the buckets the exchange of the step.
2. A hook of autograd calls `_on_gradient` whenever the gradient of a parameter is complete. It is copied into the
   bucket, and the parameter's `.grad` becomes a view of the bucket: there is never a second copy of the gradients.
3. `finish` fills the gaps, sends the remaining buckets, waits for all of them, divides by the total weight, and sets
   `.grad` of every parameter to its view. What the script does next (clipping, `optimizer.step`) works on the views.

*Unused parameters.* A share may not use every parameter: a branch that no sample took, an expert that no token chose.
Such a parameter has no gradient on this member but may have one on another, so its slot is sent as zeros. Whether
any member used it decides what the optimizer sees: a zero gradient still moves a parameter with momentum or weight
decay, while `None` leaves it alone. Therefore the last bucket has a tail with one number per parameter, 1 where it was
used; after the sum, 0 means that no member used it, and its `.grad` becomes None as it would on a single machine.

*Statistics.* The tail also carries BatchNorm's running statistics (see `running_stats`), which saves a collective.

*Failures.* If the world breaks during the backward pass, the hook raises `StepAborted` to leave it at once; `finish`
raises ExchangeBroken if a sum never completes. The step is then repeated, and nothing has been applied. A gradient that
completes twice (reentrant checkpointing) or that the script computed by itself would be summed wrongly, and is refused:
before `run.backward` unless the script zeroes it again, and after it at once, because it would be this member's own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from shoal.errors import UnusableBackward
from shoal.torch.gradients.gradient_norms import TorchGradientNorms
from shoal.torch.gradients.unattached import user_line
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.collectives.exchange import Adder, Exchange, Work

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


class StepAborted(Exception):  # noqa: N818 - it only leaves the backward pass of a step that will be repeated
    """The world broke during the backward pass."""


class Bucket:
    """Flat tensor with the gradients of some parameters, followed by a tail of other numbers (often empty)."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], tail: int, like: torch.Tensor) -> None:
        self.parameters = list(parameters)
        counts = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(counts) + tail, dtype=like.dtype, device=like.device)
        slices = torch.split(self.flat, [*counts, tail])
        self.views = [flat.view(p.shape) for flat, p in zip(slices, parameters, strict=False)]
        self.tail = slices[-1]
        self.missing = len(self.parameters)


class Buckets:
    """Gradients of a model in buckets, in the order in which the backward pass computes them.

    `statistics` is how many numbers of type `dtype` are summed along with them. `norms`, if set, is shown every
    gradient before and after the sum.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], statistics: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        tail = len(self.parameters) + statistics
        self._buckets = _lay_out(list(reversed(self.parameters)), tail, dtype)
        last = self._buckets[-1]
        self._used, self.statistics = last.tail[: len(self.parameters)], last.tail[len(self.parameters) :]
        self._position = {p: (b, i) for b in self._buckets for i, p in enumerate(b.parameters)}
        self._number = {p: n for n, p in enumerate(self.parameters)}
        self._seen: set[torch.nn.Parameter] = set()
        self._exchange: Exchange | None = None
        self._works: list[Work] = []
        self._next = 0
        self.norms: TorchGradientNorms | None = None
        # Whether run.backward is at work, and whether it was called for the batch in progress, which is not committed.
        self.in_backward = self.sealed = False
        self._touched: set[torch.nn.Parameter] = set()
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self.parameters]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def fits(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether the same parameters are trained as when the buckets were laid out."""
        trained = [p for p in parameters if p.requires_grad]
        return len(trained) == len(self.parameters) and all(map(operator.is_, trained, self.parameters))

    @property
    def has_foreign_gradients(self) -> bool:
        """Whether a parameter has a gradient that the script computed: one beside its bucket, or added to it."""
        return any(
            parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr()
            for bucket in self._buckets
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True)
        ) or any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._touched)

    def refuse_foreign_gradients(self) -> None:
        """Raise UnusableBackward if the script computed gradients itself: they would count once for each member."""
        if self.has_foreign_gradients:
            raise UnusableBackward(
                "parameters have gradients before run.backward",
                why="gradients that a script computes by itself are not summed over members",
                do="add the losses and call run.backward once, or optimizer.zero_grad() before it",
            )
        self._touched.clear()

    def arm(self, exchange: Exchange) -> None:
        """Send every bucket over this exchange as soon as it is complete."""
        self._exchange = exchange
        self._works = []
        self._seen.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def disarm(self) -> None:
        """Ignore gradients until the next `arm`."""
        self._exchange = None

    def zero_buffers(self) -> list[ZeroBuffer]:
        """Return zeros in the shape of the buckets, for a catching-up member that has no gradients."""
        return [(*operand(torch.zeros_like(bucket.flat)), None) for bucket in self._buckets]

    def finish(self, divisor: float, empty: bool) -> None:
        """Send the remaining buckets, block for all sums, and set every gradient to that of the whole global batch.

        The sums are divided by `divisor`. If `empty`, this member has no samples and contributes zeros. Raises
        ExchangeBroken if a sum cannot complete.
        """
        assert self._exchange is not None
        if empty:
            self._discard_local()
        while self._next < len(self._buckets):
            self._fill_gaps(self._buckets[self._next])
            self._launch()
        for work in self._works:
            work.wait()
        self._exchange = None
        if divisor != 1.0:
            for bucket in self._buckets:
                for view in bucket.views:
                    view.div_(divisor)
        if self.norms is not None:
            for bucket in self._buckets:
                for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                    self.norms.add_global(parameter, view)
        self._assign_gradients()

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Copy a gradient that is complete into its bucket; send all buckets whose turn has come."""
        if self._exchange is None:
            self._on_other_gradient(parameter)
            return
        self._check_gradient(parameter)
        bucket, index = self._position[parameter]
        self._copy_in(bucket, index, parameter)
        bucket.missing -= 1
        while self._next < len(self._buckets) - 1 and self._buckets[self._next].missing == 0:
            self._launch()

    def _on_other_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Refuse a gradient that the script computes after run.backward; remember one from before it."""
        if self.in_backward:
            return  # a micro-batch that is not the last
        if self.sealed:
            raise UnusableBackward(
                "loss.backward() was called after run.backward",
                where=user_line(),
                why="its gradients are those of this member's own samples and would not be summed over members",
                do="add the losses and call run.backward(loss + other_loss) once",
            )
        self._touched.add(parameter)

    def _check_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Raise if the gradient cannot count: it was completed before, or the world broke."""
        if parameter in self._seen:
            raise UnusableBackward(
                "a parameter's gradient was completed twice in one backward pass",
                why="reentrant activation checkpointing, or a second backward in the same step",
                do="use torch.utils.checkpoint with use_reentrant=False, and call run.backward once a step",
            )
        broken = getattr(self._exchange, "broken", None)
        if broken is not None:
            raise StepAborted from broken

    def _copy_in(self, bucket: Bucket, index: int, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        bucket.views[index].copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = None if gradient.is_sparse else bucket.views[index]
        self._seen.add(parameter)

    def _discard_local(self) -> None:
        for bucket in self._buckets[self._next :]:
            bucket.flat[: bucket.flat.numel() - bucket.tail.numel()].zero_()
        for parameter in self.parameters:
            parameter.grad = None
        self._seen.clear()

    def _fill_gaps(self, bucket: Bucket) -> None:
        """Zero the slots of parameters that this share did not use; another member may have used them."""
        if bucket.missing:
            for index, parameter in enumerate(bucket.parameters):
                if parameter in self._seen:
                    continue
                if parameter.grad is not None:
                    # An earlier micro-batch used it, the last one did not.
                    self._copy_in(bucket, index, parameter)
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
        """Start the sum of the next bucket."""
        assert self._exchange is not None
        bucket = self._buckets[self._next]
        if self.norms is not None:
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                self.norms.add_local(parameter, view)
        self._next += 1
        self._works.append(reduce(self._exchange, bucket.flat))

    def _assign_gradients(self) -> None:
        unused = (self._used == 0).tolist()
        for bucket in self._buckets:
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                parameter.grad = None if unused[self._number[parameter]] else view


def reduce(exchange: Exchange, flat: torch.Tensor) -> Work:
    """Start to sum a flat tensor over all members in place."""
    if getattr(exchange, "takes_tensors", False):
        return exchange.reduce(flat)  # type: ignore[arg-type]
    return exchange.reduce(*operand(flat))


def operand(flat: torch.Tensor) -> tuple[NDArray[Any], Adder | None]:
    """Return NumPy's view of a flat tensor, and a function that adds what NumPy cannot (None if it can)."""
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.uint16).numpy(), _add_bfloat16
    return flat.numpy(), None


def _add_bfloat16(into: Any, more: Any) -> None:
    torch.from_numpy(into).view(torch.bfloat16).add_(torch.from_numpy(more).view(torch.bfloat16))


def _lay_out(parameters: Sequence[torch.nn.Parameter], tail: int, dtype: torch.dtype) -> list[Bucket]:
    """Return buckets of one dtype and device each; the last one has the `dtype` of the tail, which it carries."""
    groups: list[list[torch.nn.Parameter]] = []
    room = 0.0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not groups or room <= 0 or not _same_kind(parameter, groups[-1][0]):
            room = FIRST_BYTES if not groups else BUCKET_BYTES
            groups.append([])
        groups[-1].append(parameter)
        room -= size
    tail_fits = bool(groups) and groups[-1][0].dtype == dtype
    buckets = [
        Bucket(group, tail if tail_fits and group is groups[-1] else 0, like=group[0].detach()) for group in groups
    ]
    if not tail_fits:
        device = parameters[0].device if parameters else torch.device("cpu")
        buckets.append(Bucket([], tail, like=torch.empty(0, dtype=dtype, device=device)))
    return buckets


def _same_kind(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.device == other.device
