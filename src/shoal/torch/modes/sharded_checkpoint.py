"""Loads what servers wrote into a model: its parameters and buffers, and nothing that trains them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from shoal.errors import ModelMismatch
from shoal.torch.modes.server_shard import TorchShardLayout
from shoal.torch.state import capture as state
from shoal.worker.parameter_server.sharded_checkpoint import Parts


def load(parts: Mapping[str, Any], shards: Parts) -> None:
    """Load the shards of a checkpoint into the model that is part of the script's state."""
    model: torch.nn.Module = parts["model"]
    layout = TorchShardLayout(model, 1 + len(shards))
    found = {part: state.read(header, buffers)["shard"]["tensors"] for part, (header, buffers) in shards.items()}
    _check(model, layout, found)
    with torch.no_grad():
        for part, tensors in found.items():
            for tensor, value in zip(layout.tensors_of(part), tensors, strict=True):
                tensor.copy_(value)


def _check(model: torch.nn.Module, layout: TorchShardLayout, found: Mapping[int, list[torch.Tensor]]) -> None:
    """Tensors have no names there, so that those that one of the two lacks have to tell what differs."""
    if all([_kind(t) for t in layout.tensors_of(part)] == [_kind(t) for t in there] for part, there in found.items()):
        return
    left = Counter(_kind(tensor) for tensors in found.values() for tensor in tensors)
    only_here = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        left[kind := _kind(tensor)] -= 1
        only_here += [f"{name} {kind}"] if left[kind] < 0 else []
    texts = {"only here": only_here, "only there": list(left.elements())}
    why = "; ".join(f"{text}: {', '.join(names[:5])}" for text, names in texts.items() if names)
    raise ModelMismatch(
        "the parameters and buffers of the run do not fit the model that this process has built",
        why=why or "they come in another order",
        do="build the same model in every process",
    )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
