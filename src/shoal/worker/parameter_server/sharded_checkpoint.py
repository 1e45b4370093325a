"""Checkpoint of a state that servers hold in parts, and how an evaluator reads it.

Part 0 is the ledger, the others are shards of the parameters (see `core.placement`). An evaluator needs neither the
ledger nor the optimizer state: it loads the shards into the model that its script has built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from shoal.core import sync_mode
from shoal.core.placement import LEDGER
from shoal.errors import StateMalformed
from shoal.worker.evaluation.evaluator_session import EvaluatorSession
from shoal.worker.parameter_server.parts import shard_header
from shoal.worker.training.training_state import CheckpointingSession, StateCodec
from shoal.worker.transport.snapshot import Bytes

# Description and buffers of each part, by its number.
Parts: TypeAlias = dict[int, tuple[bytes, list[Bytes]]]

# Loads shards, as a framework's shard store captured them, into the parts of the script's state by name.
Load: TypeAlias = Callable[[Mapping[str, Any], Parts], None]


class _ShardedHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a checkpoint: for each part its number, its own header, and how many buffers belong to it."""

    parts: list[tuple[int, bytes, int]]


def join_parts(parts: Parts) -> tuple[bytes, list[Bytes]]:
    """Return all parts as one header with buffers."""
    header = _ShardedHeader([(part, meta, len(buffers)) for part, (meta, buffers) in sorted(parts.items())])
    return msgspec.msgpack.encode(header), [buffer for _, (_, buffers) in sorted(parts.items()) for buffer in buffers]


def split_parts(header: bytes, buffers: list[Bytes]) -> Parts:
    """Return the parts that `join_parts` joined; raise StateMalformed if it was something else."""
    try:
        described = msgspec.msgpack.decode(header, type=_ShardedHeader).parts
    except (msgspec.DecodeError, ValueError) as error:
        raise StateMalformed(
            "not a checkpoint of parameter servers",
            why=str(error),
            do="continue with the --sync that the run was started with",
        ) from error
    expected = sum(count for _, _, count in described)
    if expected != len(buffers):
        raise StateMalformed(f"checkpoint is corrupt: expected {expected} buffers, got {len(buffers)}")
    remaining = iter(buffers)
    return {part: (meta, [np.asarray(next(remaining)) for _ in range(count)]) for part, meta, count in described}


def checkpoint_codec(session: CheckpointingSession, usual: StateCodec, load: Load) -> StateCodec:
    """Return the codec for this process: an evaluator beside servers reads theirs, all others the usual one."""
    if not isinstance(session, EvaluatorSession) or not sync_mode.parse(session.settings.sync).served:
        return usual

    def restore(parts: Mapping[str, Any], header: bytes, buffers: list[Bytes]) -> None:
        saved = split_parts(header, buffers)
        load(parts, {n: (shard_header(meta), owned) for n, (meta, owned) in saved.items() if n != LEDGER})

    return StateCodec(usual.capture, restore)
