"""What must be equal on all members before they train together, as a short hash and as text that can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import zip_longest

import torch

_SECTIONS = {
    "parameter": "the parameters",
    "buffer": "the buffers",
    "optimizer": "the optimizer",
    "setting": "the data and settings",
}


def describe(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, str | int]) -> str:
    """Return one line for each parameter, buffer, optimizer group and setting."""
    lines = [
        f"parameter {name} {_type_of(each)}{'' if each.requires_grad else ' frozen'}"
        for name, each in model.named_parameters()
    ]
    lines += [f"buffer {name} {_type_of(each)}" for name, each in model.named_buffers()]
    if optimizer is not None:
        lines += _describe_optimizer(model, optimizer)
    lines += [f"setting {key} {extra[key]}" for key in sorted(extra)]
    return "\n".join(lines)


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, str | int]) -> str:
    """Return a short text that is equal on members that can train together."""
    return fingerprint_of(describe(model, optimizer, extra))


def fingerprint_of(description: str) -> str:
    """Return the fingerprint of a description: one hash a section, so that it tells what kind of thing differs."""
    lines = description.split("\n")
    return "-".join(
        hashlib.sha256("\n".join(line for line in lines if line.startswith(f"{section} ")).encode()).hexdigest()[:12]
        for section in _SECTIONS
    )


def what_differs(mine: str, theirs: str) -> str:
    """Say in a few words what kind of thing differs between two fingerprints; empty if they are equal."""
    pairs = zip(_SECTIONS.values(), mine.split("-"), theirs.split("-"), strict=False)
    words = [word for word, here, there in pairs if here != there]
    return " and ".join(words) if words or mine == theirs else "something"


def describe_difference(mine: str, theirs: str) -> str:
    """Say in one sentence where two descriptions first differ; empty if they are equal."""
    for here, there in zip_longest(mine.split("\n"), theirs.split("\n"), fillvalue=""):
        if here == there:
            continue
        subject, other = " ".join(here.split(" ")[:2]), " ".join(there.split(" ")[:2])
        if subject == other:
            return f"{subject} is {here[len(subject) + 1 :]} here, but {there[len(other) + 1 :]} there"
        return f"{here or 'nothing'} here, where there is {there or 'nothing'} there"
    return ""


def _describe_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    lines = [f"optimizer class {type(optimizer).__name__}"]
    for index, group in enumerate(optimizer.param_groups):
        members = ",".join(str(numbers.get(id(parameter), "other")) for parameter in group["params"])
        options = ",".join(sorted(key for key in group if key not in ("params", "param_names")))
        lines.append(f"optimizer group-{index} parameters {members} with {options}")
    return lines


def _type_of(tensor: torch.Tensor) -> str:
    shape = "lazy" if torch.nn.parameter.is_lazy(tensor) else "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
