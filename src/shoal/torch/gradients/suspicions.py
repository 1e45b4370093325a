"""Warnings for scripts whose result depends on how the batch is divided, as far as the first steps show it.

None of these can be told for certain, so training continues with a warning that has a code:

- *Sums.* A loss that adds up its samples shrinks with the share. The sign is a sum, or a loss with `reduction="sum"`,
  that reaches the result through additions only.
- *Coupled samples.* A loss that compares the samples of a batch with each other (InfoNCE, in-batch negatives)
  multiplies two matrices with a row per sample into one of samples by samples. Such a product in the graph of the loss,
  of two operands that both depend on the data, is the sign.
- *Carried state.* A recurrent layer that is given the hidden state which it returned in an earlier batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoal.errors import HiddenStateCarried, LossIsSum, SamplesCoupled, ShoalError
from shoal.torch.gradients.unattached import nodes_of, user_line

# Steps in which recurrent layers are watched, and the nodes that only pass on or copy a weight.
WATCHED_STEPS = 3
_SUM = 2  # torch's number of reduction="sum"
_PASSING = ("T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "ToCopy", "Unsqueeze", "Alias")


def warn(suspicion: ShoalError) -> None:
    """Print a warning with its code."""
    sys.stderr.write(f"{suspicion.as_warning()}\n")


def coupled_samples(loss: torch.Tensor, samples: int) -> SamplesCoupled | None:
    """Return a warning if the loss of so many samples seems to compare them with each other."""
    if samples < 2:
        return None
    for node in nodes_of(loss):
        rows, columns = _product_of(node)
        if rows and rows == columns and rows in (samples, 2 * samples) and _both_depend_on_data(node):
            return SamplesCoupled(
                "the loss seems to compare the samples of a batch with each other",
                where=user_line(),
                why=f"its graph has a product of {rows} by {columns} for {samples} samples, and each member sees its "
                "own share only",
                do='pass shares="equal" to run.batches and keep the number of members fixed, or change the loss',
            )
    return None


def sum_over_samples(loss: torch.Tensor, samples: int) -> LossIsSum | None:
    """Return a warning if the loss of so many samples seems to be their sum."""
    pending = [loss.grad_fn] if samples > 1 and loss.grad_fn is not None else []
    while pending:
        node: Any = pending.pop()
        if node.name() in ("AddBackward0", "SubBackward0", "NegBackward0"):
            pending += [following for following, _ in node.next_functions if following is not None]
        elif node.name() == "SumBackward0" or getattr(node, "_saved_reduction", 1) == _SUM:
            return LossIsSum(
                "the loss seems to be a sum over samples",
                where=user_line(),
                why="each member's loss counts by its share, as a mean does: a sum shrinks with every member",
                do="divide it by the number of samples: run.backward(loss / len(x))",
            )
    return None


def _product_of(node: Any) -> tuple[int, int]:
    """Return the shape of the matrix product or matrix of distances that a node computed; zeros for other nodes."""
    name = node.name()
    try:
        if name == "MmBackward0":
            return int(node._saved_self_sym_sizes[0]), int(node._saved_mat2_sym_sizes[1])
        if name == "BmmBackward0" and node._saved_self.shape[0] == 1:
            return int(node._saved_self.shape[1]), int(node._saved_mat2.shape[2])
        if name == "CdistBackward0" and node._saved_x1.dim() == 2:
            return int(node._saved_x1.shape[0]), int(node._saved_x2.shape[0])
    except (AttributeError, RuntimeError):
        pass  # another version of torch, or an operand that was not saved
    return 0, 0


def _both_depend_on_data(node: Any) -> bool:
    return all(_is_computed(operand) for operand, _ in node.next_functions[:2])


def _is_computed(node: Any) -> bool:
    """Return whether an operand is more than a parameter, a constant or a transposed one of these."""
    while node is not None and node.name().removesuffix("Backward0") in _PASSING:
        node = node.next_functions[0][0]
    return node is not None and not node.name().endswith("AccumulateGrad")


class HiddenStateWatch:
    """Warns once if a recurrent layer of the model is given what it returned in an earlier batch."""

    def __init__(self, model: torch.nn.Module, warns: Callable[[], bool]) -> None:
        self._warns = warns
        self._body = 0
        # Hidden states that a layer returned; kept alive, so that their addresses stay theirs.
        self._returned: dict[int, tuple[int, torch.Tensor]] = {}
        self._hooks: list[Any] = []
        for layer in model.modules():
            if isinstance(layer, torch.nn.RNNBase):
                self._hooks.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
                self._hooks.append(layer.register_forward_hook(self._after))

    def begin_body(self, number: int) -> None:
        """Begin another batch, of step `number`; later steps are not watched."""
        self._body += 1
        self._returned = {address: kept for address, kept in self._returned.items() if kept[0] == self._body - 1}
        if number >= WATCHED_STEPS:
            self.close()

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._returned = [], {}

    def _before(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = args[1] if len(args) > 1 else kwargs.get("hx")
        for tensor in _states(state):
            body, _ = self._returned.get(tensor.untyped_storage().data_ptr(), (self._body, tensor))
            if body != self._body:
                if self._warns():
                    warn(_carried(layer))
                self.close()
                return

    def _after(self, _layer: torch.nn.Module, _args: Any, output: Any) -> None:
        for tensor in _states(output[1] if isinstance(output, tuple) else None):
            self._returned[tensor.untyped_storage().data_ptr()] = (self._body, tensor.detach())


def _carried(layer: torch.nn.Module) -> HiddenStateCarried:
    return HiddenStateCarried(
        f"{type(layer).__name__} was given the hidden state of an earlier batch",
        where=user_line(),
        why="consecutive batches of a member are not consecutive in the data, and shares change their size",
        do="start every batch without a state, as in rnn(x)",
    )


def _states(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, tuple | list):
        for part in state:
            yield from _states(part)
