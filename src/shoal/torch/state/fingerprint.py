"""Fingerprint of a script: what must be equal on all members before they train together.

It is text of the form ``key=value;key=value``, which the coordinator compares (`core.membership.fingerprint`). The
parameters, the buffers and all attached optimizers are listed in full if the list is short, so that the error can name
the tensor that differs; the list of a large model is replaced by its length, its number of elements and its hash.
Values of tensors, learning rates and other options of an optimizer may differ: joiners receive them from a peer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

# Longer lists are hashed: a fingerprint is journalled each time a member joins.
LISTED_CHARACTERS = 2000


def fingerprint(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], settings: Mapping[str, object]
) -> str:
    """Return the fingerprint of a model, its optimizers and the settings that members must agree on."""
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    sections: dict[str, object] = {
        "parameters": _tensors(parameters),
        "buffers": _tensors(buffers),
        "optimizer": _listed((line for each in optimizers for line in _optimizer_lines(model, each)), ""),
    }
    return ";".join(f"{key}={value}" for key, value in (sections | dict(settings)).items())


def _tensors(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    lines = [f"{name} {_type_of(tensor)}{_frozen(tensor)}" for name, tensor in named]
    elements = sum(0 if torch.nn.parameter.is_lazy(tensor) else tensor.numel() for _, tensor in named)
    return _listed(lines, f"{len(named)} tensors of {elements} elements ")


def _listed(lines: Iterable[str], summary: str) -> str:
    """Return the lines as a list, or their summary and hash if that is too long."""
    text = ", ".join(line.replace(";", ",") for line in lines)
    if len(text) <= LISTED_CHARACTERS:
        return text or "none"
    return f"{summary}SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _optimizer_lines(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    lines = [type(optimizer).__name__]
    for index, group in enumerate(optimizer.param_groups):
        members = ",".join(str(numbers.get(id(parameter), "other")) for parameter in group["params"])
        options = ",".join(sorted(key for key in group if key not in ("params", "param_names")))
        lines.append(f"group-{index} parameters {members} with {options}")
    return lines


def _frozen(tensor: torch.Tensor) -> str:
    return " frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""


def _type_of(tensor: torch.Tensor) -> str:
    shape = "lazy" if torch.nn.parameter.is_lazy(tensor) else "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
