"""Loads a checkpoint that parameter servers wrote into a model: parameters and buffers, no optimizer state."""

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
    """Load the shards of a checkpoint into `parts["model"]`; raise ModelMismatch, before any change, if they differ."""
    model: torch.nn.Module = parts["model"]
    layout = TorchShardLayout(model, 1 + len(shards))
    saved = {part: state.read(header, buffers)["shard"]["tensors"] for part, (header, buffers) in shards.items()}
    _check(model, layout, saved)
    with torch.no_grad():
        for part, tensors in saved.items():
            for tensor, value in zip(layout.tensors_of(part), tensors, strict=True):
                tensor.copy_(value)


def _check(model: torch.nn.Module, layout: TorchShardLayout, saved: Mapping[int, list[torch.Tensor]]) -> None:
    """Raise ModelMismatch unless types and shapes agree; saved tensors have no names, so surplus ones are listed."""
    if all(list(map(_kind, layout.tensors_of(part))) == list(map(_kind, tensors)) for part, tensors in saved.items()):
        return
    unmatched = Counter(_kind(tensor) for tensors in saved.values() for tensor in tensors)
    only_in_model = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        unmatched[kind := _kind(tensor)] -= 1
        only_in_model += [f"{name} {kind}"] if unmatched[kind] < 0 else []
    texts = {"only in this model": only_in_model, "only in the checkpoint": list(unmatched.elements())}
    why = "; ".join(f"{text}: {', '.join(names[:5])}" for text, names in texts.items() if names)
    raise ModelMismatch(
        "the checkpoint does not fit the model of this process",
        why=why or "the same tensors, but in another order",
        do="build the same model in every process",
    )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
