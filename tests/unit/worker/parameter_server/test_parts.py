"""Parts of the state on a server: updates, copies, and which tickets a shard contains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server.ticket_ledger import Ticket, TicketGranted, TicketLedger
from shoal.worker.parameter_server.parts import LedgerPart, LedgerUpdate, ParameterShard, shard_header
from shoal.worker.parameter_server.rpc import MalformedFrame, PushGradients

ORDER = SampleOrder(samples=36, size=8, epochs=2)


class SumStore:
    """A shard store whose parameter is the sum of all gradients."""

    def __init__(self) -> None:
        self.value, self.changes = np.zeros(1), 0
        self.fractions: list[float] = []

    def check(self, part: int, how: bytes, body: memoryview) -> None:
        if len(body) != 8:
            raise MalformedFrame("expected one number")

    def apply(self, part: int, how: bytes, samples: int, fraction: float, body: memoryview) -> None:
        self.fractions.append(fraction)
        self.value, self.changes = self.value + np.frombuffer(body, np.float64), self.changes + 1

    def version(self, part: int) -> int:
        return self.changes

    def parameters(self, part: int) -> list[Any]:
        return [self.value.copy().view(np.uint8)]

    def capture(self, part: int) -> tuple[bytes, list[Any]]:
        return b"header", self.parameters(part)

    def install(self, part: int, header: bytes, buffers: Sequence[Any]) -> None:
        self.value = np.frombuffer(buffers[0], np.float64).copy()

    def reset(self, part: int) -> None:
        self.value = np.zeros(1)


def push(shard: ParameterShard, step: int, start: int = 0, *, low: int = 0, settled: int = 0) -> None:
    call = PushGradients(1, 1, Ticket(step, start, start + 4), 0, low, settled, b"")
    shard.apply(msgspec.msgpack.encode(call), memoryview(np.ones(1).tobytes()))


def test_shard_knows_its_tickets_even_after_it_dropped_settled_ones() -> None:
    shard = ParameterShard(1, 1, SumStore(), ORDER)
    for step in range(4):
        push(shard, step, settled=max(0, step - 1))
    assert shard.version == 4
    assert all(shard.has(Ticket(step, 0, 4)) for step in range(4))
    assert not shard.has(Ticket(3, 4, 8))
    assert shard.applied == {(2, 0), (3, 0)}, "tickets of settled steps are kept for ever"


def test_statistics_move_by_the_ticket_s_part_of_its_own_batch() -> None:
    store = SumStore()
    shard = ParameterShard(1, 1, store, ORDER)
    push(shard, 0)
    push(shard, 4)
    assert ORDER.size_of(4) == 4, "the short last batch of the epoch"
    assert store.fractions == [0.5, 1.0]


def test_copy_of_a_shard_has_its_values_and_its_tickets() -> None:
    shard, copy = ParameterShard(1, 1, SumStore(), ORDER), ParameterShard(1, 1, SumStore(), ORDER)
    push(shard, 5, low=3, settled=5)
    meta, buffers = shard.capture()
    copy.install(meta, buffers)
    assert shard_header(meta) == b"header"
    assert (copy.has(Ticket(5, 0, 4)), copy.has(Ticket(4, 0, 4)), copy.has(Ticket(5, 4, 8))) == (True, True, False)
    assert copy.floor == 3
    assert copy.capture()[1][0].tobytes() == buffers[0].tobytes()


def test_parameters_are_read_only_if_they_changed() -> None:
    shard = ParameterShard(1, 1, SumStore(), ORDER)
    push(shard, 0)
    version, buffers = shard.read(0)
    assert (version, len(buffers)) == (1, 1)
    assert shard.read(version) == (1, [])


def test_copies_of_the_ledger_agree_after_the_same_updates() -> None:
    ledger, copy = (LedgerPart(0, 1, TicketLedger(1), ORDER) for _ in range(2))
    update = LedgerUpdate("t", "1", wants=True)
    _, outcome = ledger.outcome(update)
    assert isinstance(outcome, TicketGranted)
    assert ledger.version == 0, "asking for the outcome changed the ledger"
    packed = msgspec.msgpack.encode(update)
    for part in (ledger, copy):
        part.apply(packed, memoryview(b""))
    assert ledger.ledger == copy.ledger
    copy.install(*ledger.capture())
    assert copy.ledger == ledger.ledger
    gone = msgspec.msgpack.encode(LedgerUpdate("t", "1", gone=True))
    ledger.apply(gone, memoryview(b""))
    assert (ledger.ledger.trainers, ledger.ledger.returned) == ({}, (outcome.ticket,))
