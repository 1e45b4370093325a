"""Loading of a checkpoint that servers wrote into a Keras model: its variables, without optimizer state."""

from __future__ import annotations

import numpy as np

from shoal.errors import ModelMismatch
from shoal.keras.backends.base import KerasBackend
from shoal.keras.modes.server_shard import KerasShardLayout
from shoal.worker.parameter_server.sharded_checkpoint import Parts


def load(backend: KerasBackend, shards: Parts) -> None:
    """Load the variables of all shards; raise ModelMismatch, and change nothing, if one does not fit.

    The buffers of a shard begin with its variables; the state of its optimizer follows.
    """
    layout = KerasShardLayout(backend.model, backend.read, 1 + len(shards))
    assignments = []
    for part, (_, buffers) in shards.items():
        variables = layout.variables_of(part)
        expected_bytes = [layout.like(variable).nbytes for variable in variables]
        saved_bytes = [len(buffer) for buffer in buffers[: len(variables)]]
        if saved_bytes != expected_bytes:
            raise ModelMismatch(
                f"shard {part} of the checkpoint does not fit the model of this process",
                why=f"its variables have {saved_bytes} bytes, not {expected_bytes}",
                do="build the same model in every process",
            )
        assignments += list(zip(variables, buffers, strict=False))
    for variable, raw in assignments:
        like = layout.like(variable)
        variable.assign(np.frombuffer(raw, np.uint8).view(like.dtype).reshape(like.shape))
