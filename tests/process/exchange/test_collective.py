from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.process.exchange.meeting import NEVER, world_of

from shoal.worker.collectives.exchange import ExchangeBroken

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.process


def gather_all(ports, number=1, on_break=None):
    from shoal.torch.gradients.process_group import connect

    world = world_of(ports, number)
    with ThreadPoolExecutor(len(ports)) as pool:
        return list(pool.map(lambda port: connect(port, world, 10.0, NEVER, on_break), ports))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_sums_what_the_ring_sums(make_ports, size):
    exchanges = gather_all(make_ports(size))
    parts = [np.full(5000, exchange.rank + 1.0, np.float32) for exchange in exchanges]
    for ticket in [exchange.reduce(part) for exchange, part in zip(exchanges, parts, strict=True)]:
        ticket.wait()
    assert all((part == size * (size + 1) / 2).all() for part in parts)
    for ticket in [exchange.gather(np.ones(3)) for exchange in exchanges]:
        assert ticket.result().shape == (size, 3)
    for exchange in exchanges:
        exchange.close()


def test_bfloat16_is_summed_though_numpy_has_no_such_type(make_ports):
    exchanges = gather_all(make_ports(2))
    parts = [np.full(100, 0x3F80, np.uint16) for _ in exchanges]
    for ticket in [exchange.reduce(part, lambda *_: None) for exchange, part in zip(exchanges, parts, strict=True)]:
        ticket.wait()
    assert all((part == 0x4000).all() for part in parts)
    for exchange in exchanges:
        exchange.close()


def test_abort_ends_a_pending_sum_at_once_and_everywhere(make_ports):
    exchanges = gather_all(make_ports(3))
    tickets = [exchange.reduce(np.ones(100_000, np.float32)) for exchange in exchanges[:2]]
    threading.Timer(0.1, exchanges[0].abort, ["enough"]).start()
    started = time.monotonic()
    for ticket in tickets:
        with pytest.raises(ExchangeBroken):
            ticket.wait()
    assert time.monotonic() - started < 8
    for exchange in exchanges:
        exchange.close()


def test_thirty_worlds_leak_no_descriptors(make_ports):
    ports = make_ports(2)
    counts = []
    for number in range(1, 31):
        for exchange in gather_all(ports, number):
            exchange.close()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[4]
