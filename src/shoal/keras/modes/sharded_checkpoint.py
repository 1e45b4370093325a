"""Loads what servers wrote into a Keras model: its variables, and nothing that trains them."""

from __future__ import annotations

import numpy as np

from shoal.errors import ModelMismatch
from shoal.keras.backends.base import KerasBackend
from shoal.keras.modes.server_shard import KerasShardLayout
from shoal.worker.parameter_server.sharded_checkpoint import Parts


def load(backend: KerasBackend, shards: Parts) -> None:
    """Load the shards of a checkpoint; of each, the variables come first, and then the state of its optimizer."""
    layout = KerasShardLayout(backend.model, backend.read, 1 + len(shards))
    found = []
    for part, (_, buffers) in shards.items():
        variables = layout.variables_of(part)
        sizes_bytes = [layout.like(one).nbytes for one in variables]
        if [len(one) for one in buffers[: len(variables)]] != sizes_bytes:
            raise ModelMismatch(
                f"shard {part} of the run does not fit the model that this process has built",
                why=f"its variables have {[len(one) for one in buffers][: len(variables)]} bytes, not {sizes_bytes}",
                do="build the same model in every process",
            )
        found += list(zip(variables, buffers, strict=False))
    for variable, raw in found:
        like = layout.like(variable)
        variable.assign(np.frombuffer(raw, np.uint8).view(like.dtype).reshape(like.shape))
