"""A Gloo group sums tensors over the members of a ring, and is cut when the ring breaks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.testing.wait import until
from shoal.torch.gradients.process_group import ProcessGroupExchange, _RingStore
from shoal.worker.collectives.ring import Ring
from shoal.worker.transport.connect import ConnectDeadline
from shoal.worker.transport.exchange_broken import ExchangeBroken

HANG_S = 60.0


def ring_of(session: FixedWorldSession) -> Ring:
    assert isinstance(session.exchange, Ring)
    return session.exchange


@contextmanager
def gloo(session: FixedWorldSession) -> Iterator[ProcessGroupExchange]:
    exchange = ProcessGroupExchange(ring_of(session), "127.0.0.1", HANG_S)
    yield exchange
    exchange.cut()


def test_group_sums_floats_and_bfloat16_and_the_ring_gathers_beside_it() -> None:
    def body(session: FixedWorldSession) -> tuple[list[float], list[float], list[float]]:
        with gloo(session) as exchange:
            flat = np.full(2, 1.0 + session.rank, np.float32)
            half = torch.full((2,), 1.0 + session.rank, dtype=torch.bfloat16)
            works = [exchange.reduce(flat), exchange.reduce(half.view(torch.uint16).numpy(), np.add)]
            gathered = exchange.gather(np.array([float(session.rank)])).result()
            for work in works:
                work.wait()
            exchange.barrier()
            return flat.tolist(), half.tolist(), gathered.ravel().tolist()

    assert together(2, body) == [([3.0, 3.0], [3.0, 3.0], [0.0, 1.0])] * 2


def test_group_of_one_needs_no_connections() -> None:
    exchange = ProcessGroupExchange(Ring(0, ["alone"]), "127.0.0.1", HANG_S)
    flat = np.ones(2, np.float32)
    exchange.reduce(flat).wait()
    assert flat.tolist() == [1.0, 1.0]
    exchange.close()


def test_sum_fails_at_once_when_a_member_aborts() -> None:
    aborted = threading.Event()

    def body(session: FixedWorldSession) -> str:
        exchange = ProcessGroupExchange(ring_of(session), "127.0.0.1", HANG_S)
        exchange.barrier()
        if session.rank == 1:
            exchange.abort("told to")
            aborted.set()
            return ""
        aborted.wait(HANG_S)
        with pytest.raises(ExchangeBroken):
            exchange.reduce(np.ones(2, np.float32)).wait()
        assert exchange.broken is not None
        raise LookupError("as expected")  # leave without the barrier of `together`

    with pytest.raises((LookupError, ExchangeBroken)):
        together(2, body)


def test_entries_of_the_store_reach_every_member() -> None:
    def body(session: FixedWorldSession) -> list[bytes]:
        store = _RingStore()
        with store.shared_over(ring_of(session), ConnectDeadline(HANG_S, threading.Event())):
            store.set(f"key{session.rank}", f"value {session.rank}")
            values = store.multi_get(["key0", "key1"])
        assert store.check(["key0", "key1"])
        assert not store.check(["key2"])
        return values

    assert together(2, body) == [[b"value 0", b"value 1"]] * 2


def test_rendezvous_that_a_member_does_not_join_ends_at_the_deadline() -> None:
    causes: list[str] = []

    def body(session: FixedWorldSession) -> None:
        ring = ring_of(session)
        if session.rank == 1:
            until(lambda: ring.broken is not None, "the other member to give up")
        else:
            with pytest.raises((ExchangeBroken, RuntimeError)) as broken:
                ProcessGroupExchange(ring, "127.0.0.1", 0.1)
            causes.append(str(broken.value))
        raise LookupError("as expected")  # leave without the barrier of `together`

    with pytest.raises((LookupError, ExchangeBroken)):
        together(2, body)
    assert "did not join the rendezvous" in causes[0]
