"""A state that servers hold in parts, as one checkpoint, and how an evaluator reads it.

Part 0 is the ledger, the others are shards of the parameters (see `core.shards`). An evaluator has no use for the
ledger, nor for what trains the parameters: it loads the shards into the model that its script has built.
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
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.training_state import StateCodec
from shoal.worker.transport.snapshot import Bytes

# By number, what describes a part and its buffers.
Parts: TypeAlias = dict[int, tuple[bytes, list[Bytes]]]

# Loads shards, as a framework's vault captured them, into the parts of the script's state by name.
Load: TypeAlias = Callable[[Mapping[str, Any], Parts], None]


class _ShardedHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of a checkpoint: for each part its own, and how many of the buffers are its."""

    parts: list[tuple[int, bytes, int]]


def join_parts(parts: Parts) -> tuple[bytes, list[Bytes]]:
    """All parts as one header with buffers."""
    header = _ShardedHeader([(part, meta, len(buffers)) for part, (meta, buffers) in sorted(parts.items())])
    return msgspec.msgpack.encode(header), [one for _, (_, owned) in sorted(parts.items()) for one in owned]


def split_parts(header: bytes, buffers: list[Bytes]) -> Parts:
    """The parts that make up a whole."""
    try:
        described = msgspec.msgpack.decode(header, type=_ShardedHeader).parts
    except (msgspec.DecodeError, ValueError) as error:
        raise StateMalformed(
            "this is no checkpoint of servers",
            why=str(error),
            do="go on with the --sync that the run was started with",
        ) from error
    if sum(count for _, _, count in described) != len(buffers):
        raise StateMalformed("the buffers of a checkpoint are not those that its header describes")
    left = iter(buffers)
    return {part: (meta, [np.asarray(next(left)) for _ in range(count)]) for part, meta, count in described}


def checkpoint_codec(session: Session | ServedSession | StandaloneSession, usual: StateCodec, load: Load) -> StateCodec:
    """How this process reads the checkpoints of its run: an evaluator beside servers reads theirs."""
    if not isinstance(session, EvaluatorSession) or not sync_mode.parse(session.settings.sync).served:
        return usual

    def restore(parts: Mapping[str, Any], header: bytes, buffers: list[Bytes]) -> None:
        found = split_parts(header, buffers)
        load(parts, {n: (shard_header(meta), owned) for n, (meta, owned) in found.items() if n != LEDGER})

    return StateCodec(usual.capture, restore)
