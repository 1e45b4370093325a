"""Checkpoints of parts, and how an evaluator beside servers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.core.data.sample_order import SampleOrder
from shoal.core.placement import LEDGER
from shoal.errors import StateMalformed
from shoal.settings import RunSettings
from shoal.worker.evaluation import evaluator_session
from shoal.worker.evaluation.evaluator_session import EvaluatorSession
from shoal.worker.parameter_server.parts import ParameterShard
from shoal.worker.parameter_server.sharded_checkpoint import checkpoint_codec, join_parts, split_parts
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.training_state import StateCodec

USUAL = StateCodec(lambda _parts: (b"", []), lambda _parts, _header, _buffers: None)


class BytesStore:
    """A shard store whose parameters are some bytes."""

    def capture(self, part: int) -> tuple[bytes, list[Any]]:
        return f"part {part}".encode(), [np.full(part, part, np.uint8)] * part


def shard(number: int) -> tuple[bytes, list[Any]]:
    return ParameterShard(number, 1, BytesStore(), SampleOrder(8, 8)).capture()  # type: ignore[arg-type]


PARTS = {LEDGER: (b"ledger", []), 1: shard(1), 2: shard(2)}


@pytest.fixture
def evaluator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes an evaluator's session under a sync mode, without a coordinator."""
    monkeypatch.setattr(evaluator_session, "EvaluatorClient", lambda _environment: None)

    def make(sync: str) -> EvaluatorSession:
        settings = RunSettings(sync=sync)
        return EvaluatorSession(
            MemberEnvironment("", "", "r", "m/e", "1", "h", {}, settings, str(tmp_path), "evaluator")
        )

    return make


def test_split_returns_the_parts_that_were_joined() -> None:
    parts = split_parts(*join_parts(PARTS))
    assert {n: (meta, [b.tolist() for b in owned]) for n, (meta, owned) in parts.items()} == {
        n: (meta, [b.tolist() for b in owned]) for n, (meta, owned) in PARTS.items()
    }


def test_evaluator_loads_the_shards_without_the_ledger(evaluator: Any) -> None:
    loads: list[Any] = []
    codec = checkpoint_codec(evaluator("stale:2"), USUAL, lambda parts, shards: loads.append((parts, shards)))
    codec.restore({"model": "the model"}, *join_parts(PARTS))
    ((parts, shards),) = loads
    assert parts == {"model": "the model"}
    assert {n: (header, len(owned)) for n, (header, owned) in shards.items()} == {1: (b"part 1", 1), 2: (b"part 2", 2)}


@pytest.mark.parametrize("sync", ["step", "local:4"])
def test_evaluator_without_servers_uses_the_usual_codec(evaluator: Any, sync: str) -> None:
    assert checkpoint_codec(evaluator(sync), USUAL, lambda _parts, _shards: None) is USUAL


def test_trainer_uses_the_usual_codec() -> None:
    assert checkpoint_codec(StandaloneSession(), USUAL, lambda _parts, _shards: None) is USUAL


@pytest.mark.parametrize("header", [b"", b"\xff", msgspec.msgpack.encode({"format": 1})])
def test_checkpoint_of_another_sync_mode_is_refused(header: bytes) -> None:
    with pytest.raises(StateMalformed, match="not a checkpoint of parameter servers"):
        split_parts(header, [])


def test_missing_buffer_is_noticed() -> None:
    header, buffers = join_parts(PARTS)
    with pytest.raises(StateMalformed, match="buffers"):
        split_parts(header, buffers[:-1])
