"""A state in parts is one checkpoint, and an evaluator beside servers reads it as such."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.core.placement import LEDGER
from shoal.errors import StateMalformed
from shoal.settings import RunSettings
from shoal.worker.evaluation.evaluator_session import EvaluatorSession
from shoal.worker.parameter_server import sharded_checkpoint as parameter_server_sharded_checkpoint
from shoal.worker.parameter_server.parts import ParameterShard
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.training_state import StateCodec

USUAL = StateCodec(lambda _parts: (b"", []), lambda _parts, _header, _buffers: None)


class Bytes:
    """A vault whose parameters are some bytes."""

    def capture(self, part: int) -> tuple[bytes, list[Any]]:
        return f"part {part}".encode(), [np.full(part, part, np.uint8)] * part


def shard(number: int) -> tuple[bytes, list[Any]]:
    return ParameterShard(number, 1, Bytes()).capture()  # type: ignore[arg-type]


PARTS = {LEDGER: (b"ledger", []), 1: shard(1), 2: shard(2)}


def evaluator(sync: str) -> EvaluatorSession:
    session = EvaluatorSession.__new__(EvaluatorSession)
    session.settings = RunSettings(sync=sync)
    return session


def test_parts_come_out_of_a_whole_as_they_went_in() -> None:
    found = parameter_server_sharded_checkpoint.split_parts(*parameter_server_sharded_checkpoint.join_parts(PARTS))
    assert {n: (meta, [b.tolist() for b in owned]) for n, (meta, owned) in found.items()} == {
        n: (meta, [b.tolist() for b in owned]) for n, (meta, owned) in PARTS.items()
    }


def test_what_the_vaults_captured_is_loaded_and_the_ledger_is_not() -> None:
    seen: list[Any] = []
    codec = parameter_server_sharded_checkpoint.checkpoint_codec(
        evaluator("stale:2"), USUAL, lambda parts, shards: seen.append((parts, shards))
    )
    codec.restore({"model": "mine"}, *parameter_server_sharded_checkpoint.join_parts(PARTS))
    ((parts, shards),) = seen
    assert parts == {"model": "mine"}
    assert {n: (header, len(owned)) for n, (header, owned) in shards.items()} == {1: (b"part 1", 1), 2: (b"part 2", 2)}


@pytest.mark.parametrize("session", [StandaloneSession(), evaluator("step"), evaluator("local:4")])
def test_all_others_read_checkpoints_as_ever(session: Any) -> None:
    assert parameter_server_sharded_checkpoint.checkpoint_codec(session, USUAL, lambda _parts, _shards: None) is USUAL


@pytest.mark.parametrize("header", [b"", b"\xff", msgspec.msgpack.encode({"format": 1})])
def test_a_checkpoint_that_no_server_wrote_is_refused(header: bytes) -> None:
    with pytest.raises(StateMalformed, match="no checkpoint of servers"):
        parameter_server_sharded_checkpoint.split_parts(header, [])


def test_a_buffer_that_is_missing_is_noticed() -> None:
    header, buffers = parameter_server_sharded_checkpoint.join_parts(PARTS)
    with pytest.raises(StateMalformed, match="buffers"):
        parameter_server_sharded_checkpoint.split_parts(header, buffers[:-1])
