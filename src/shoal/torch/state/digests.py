"""Digests of the tensors that must be equal on all members: parameters, buffers and the optimizers' state."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.core.state_check import PROBES, Kind, TensorDigest, digest
from shoal.torch.state.capture import as_bytes

NOT_OWNED = "an optimizer that is not attached trains it: pass every optimizer to run.attach"
# Counts forward passes, of which members with small micro-batches make more.
OWN_COUNTERS = "num_batches_tracked"


def tensor_digests(parts: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[TensorDigest]:
    """Yield the digests of all attached modules, and of the state of these optimizers."""
    owned = {id(p) for part in parts.values() for group in getattr(part, "param_groups", ()) for p in group["params"]}
    names: dict[int, str] = {}
    for part_name, part in parts.items():
        if not isinstance(part, torch.nn.Module):
            continue
        prefix = "" if part_name == "model" else f"{part_name}."
        for name, parameter in part.named_parameters():
            names[id(parameter)] = name
            hint = "" if id(parameter) in owned else NOT_OWNED
            yield _digest(prefix + name, "parameter", parameter, hint)
        for name, buffer in part.named_buffers():
            if not name.endswith(OWN_COUNTERS):
                yield _digest(prefix + name, "buffer", buffer)
    for number, optimizer in enumerate(optimizers, 1):
        yield from _of_optimizer(f"optimizer{number}", optimizer, names)


def mode_digest(model: torch.nn.Module) -> TensorDigest:
    """Return a digest of which modules are in training mode, taken when a step has been computed."""
    flags = bytes(module.training for module in model.modules())
    hint = "model.train() or model.eval() was called on one member alone"
    return TensorDigest(
        "number of modules in training mode", "parameter", zlib.crc32(flags), (float(sum(flags)),), hint
    )


def _of_optimizer(prefix: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[TensorDigest]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        for key in sorted(state, key=str):
            value, name = state[key], f"{prefix} {key} of {names.get(id(parameter), index)}"
            if isinstance(value, torch.Tensor):
                yield _digest(name, "optimizer", value)
            elif isinstance(value, int | float):
                yield TensorDigest(name, "optimizer", zlib.crc32(repr(value).encode()), (float(value),))


def _digest(name: str, kind: Kind, tensor: torch.Tensor, hint: str = "") -> TensorDigest:
    if torch.nn.parameter.is_lazy(tensor):
        return TensorDigest(name, kind, 0, ())
    values = tensor.detach()
    flat = values.reshape(-1)
    stride = max(1, flat.numel() // PROBES)
    probes = flat[::stride][:PROBES]
    numbers = (probes.abs() if probes.is_complex() else probes).double().tolist()
    return TensorDigest(name, kind, digest(as_bytes([values])[0]), tuple(numbers), hint)
