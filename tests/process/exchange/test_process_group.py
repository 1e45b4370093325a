from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.process.exchange.loopback import NEVER, world_of

from shoal.testing.wait import until
from shoal.worker.transport.exchange_broken import ExchangeBroken

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.process


def gather_all(peers, number=1, on_break=None):
    from shoal.torch.gradients.process_group import connect

    world = world_of(peers, number)
    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(lambda peer: connect(peer, world, 10.0, NEVER, on_break), peers))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_gives_the_same_sum_as_the_ring(make_peers, size):
    exchanges = gather_all(make_peers(size))
    parts = [np.full(5000, exchange.rank + 1.0, np.float32) for exchange in exchanges]
    for work in [exchange.reduce(part) for exchange, part in zip(exchanges, parts, strict=True)]:
        work.wait()
    assert all((part == size * (size + 1) / 2).all() for part in parts)
    for work in [exchange.gather(np.ones(3)) for exchange in exchanges]:
        assert work.result().shape == (size, 3)
    for exchange in exchanges:
        exchange.close()


def test_bfloat16_is_summed_by_gloo(make_peers):
    exchanges = gather_all(make_peers(2))
    parts = [np.full(100, 0x3F80, np.uint16) for _ in exchanges]
    for work in [exchange.reduce(part, lambda *_: None) for exchange, part in zip(exchanges, parts, strict=True)]:
        work.wait()
    assert all((part == 0x4000).all() for part in parts)
    for exchange in exchanges:
        exchange.close()


def test_abort_ends_a_pending_sum_on_all_ranks(make_peers):
    exchanges = gather_all(make_peers(3))
    works = [exchange.reduce(np.ones(100_000, np.float32)) for exchange in exchanges[:2]]
    threading.Timer(0.1, exchanges[0].abort, ["enough"]).start()
    started = time.monotonic()
    for work in works:
        with pytest.raises(ExchangeBroken):
            work.wait()
    assert time.monotonic() - started < 8
    for exchange in exchanges:
        exchange.close()


def test_thirty_worlds_leak_no_descriptors(make_peers):
    peers = make_peers(2)
    counts = []
    for number in range(1, 31):
        for exchange in gather_all(peers, number):
            exchange.close()
        counts.append(len(os.listdir("/proc/self/fd")))
    until(lambda: len(os.listdir("/proc/self/fd")) <= counts[4], "all descriptors are closed")
