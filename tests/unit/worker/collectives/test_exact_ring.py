"""Sums over shards on real rings: the same bits for any number of members and any split."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.core.shares.reduction_tree import NO_SHARDS, ShardRange, assign_shards, completed_nodes
from shoal.worker.collectives.exchange import TreePartials
from shoal.worker.collectives.ring import Ring
from shoal.worker.transport.exchange_broken import ExchangeBroken

SHARDS = 13
SHARES = [(1,), (1, 1), (1, 12), (1, 1, 1), (0, 3, 4), (5, 0, 1), (3, 4, 0), (2, 5, 1, 3, 2), (0, 0, 1, 0), (1,) * 8]


@contextmanager
def rings_of(size: int) -> Iterator[list[Ring]]:
    names = [f"m{rank}" for rank in range(size)]
    pairs = [socket.socketpair() for _ in range(size)]
    rings = [Ring(r, names, pairs[r][0], pairs[r - 1][1]) if size > 1 else Ring(0, names) for r in range(size)]
    try:
        yield rings
    finally:
        for ring in rings:
            ring.close()


def leaves(count: int, dtype: type) -> list[NDArray[Any]]:
    random = np.random.default_rng(3)
    return [(random.standard_normal(count) * 10.0 ** random.integers(-3, 3)).astype(dtype) for _ in range(SHARDS)]


def part_of(values: list[NDArray[Any]], shards: ShardRange) -> TreePartials:
    stack: list[NDArray[Any]] = []
    for shard in range(shards.start, shards.stop):
        total = values[shard].copy()
        for _ in range(completed_nodes(shards.shards, shards.start, shard)):
            total = stack.pop() + total
        stack.append(total)
    return TreePartials(shards, stack)


def summed(shares: tuple[int, ...], values: list[NDArray[Any]]) -> set[bytes]:
    parts = [part_of(values, shards) for shards in assign_shards(shares, SHARDS)]
    with rings_of(len(shares)) as rings:
        # The content of the buffer does not count; the first node may be the buffer itself.
        flats = [part.nodes[0] if part.nodes else np.full_like(values[0], 7) for part in parts]
        works = [ring.reduce(flat, part=part) for ring, flat, part in zip(rings, flats, parts, strict=True)]
        for work in works:
            assert work.done(20.0), "the sum did not end"
            work.wait()
    return {flat.tobytes() for flat in flats}


@pytest.mark.parametrize("count", [0, 1, 3, 997, 40_001, pytest.param(700_003, marks=pytest.mark.process)])
def test_every_split_gives_the_same_bits(count: int) -> None:
    values = leaves(count, np.float32)
    results = [summed(shares, values) for shares in SHARES]
    assert all(len(result) == 1 for result in results), "ranks differ"
    assert len(set.union(*results)) == 1, "splits differ"
    total = np.frombuffer(results[0].pop(), np.float32)
    np.testing.assert_allclose(total, np.sum(np.array(values, np.float64), axis=0), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types_give_the_same_bits(dtype: type) -> None:
    values = leaves(50_021, dtype)
    assert len(set.union(*(summed(shares, values) for shares in SHARES[:5]))) == 1


def test_sum_without_shards_is_zero() -> None:
    with rings_of(3) as rings:
        flats = [np.full(10, 7.0, np.float32) for _ in rings]
        for work in [ring.reduce(flat, part=TreePartials()) for ring, flat in zip(rings, flats, strict=True)]:
            work.wait()
    assert not any(flat.any() for flat in flats)


def test_missing_shards_break_the_exchange() -> None:
    with rings_of(2) as rings:
        shards = [ShardRange(4, 0, 2), ShardRange(4, 2, 3)]
        buffers = [np.ones(8, np.float32) for _ in rings]
        works = [r.reduce(b, part=TreePartials(h, [b])) for r, b, h in zip(rings, buffers, shards, strict=True)]
        causes = []
        for work in works:
            with pytest.raises(ExchangeBroken) as caught:
                work.wait()
            causes.append(caught.value.cause)
    assert any("all shards" in cause or "follow" in cause for cause in causes), causes


def test_wrong_number_of_nodes_is_refused() -> None:
    with rings_of(1) as rings, pytest.raises(ValueError, match="nodes"):
        rings[0].reduce(np.zeros(4, np.float32), part=TreePartials(ShardRange(4, 0, 3), [np.zeros(4, np.float32)]))


def test_sum_over_shards_can_be_aborted_while_a_rank_is_missing() -> None:
    with rings_of(3) as rings:
        buffer = np.ones(900_000, np.float32)
        work = rings[0].reduce(buffer, part=TreePartials(ShardRange(1, 0, 1), [buffer]))
        threading.Timer(0.05, rings[0].abort, ("enough",)).start()
        with pytest.raises(ExchangeBroken, match="enough"):
            work.wait()


def test_sums_of_all_kinds_follow_each_other() -> None:
    with rings_of(3) as rings:
        works = []
        for rank, ring in enumerate(rings):
            for number in range(12):
                big, small = np.full(120_000, 1.0, np.float32), np.full(5, float(rank), np.float32)
                shards = (
                    ShardRange(3, rank, rank + 1) if number % 3 else (ShardRange(2, 0, 2) if rank == 1 else NO_SHARDS)
                )
                works.append((ring.reduce(big, part=TreePartials(shards, [big] if not shards.empty else [])), big))
                works.append((ring.reduce(small), small))
        for work, _ in works:
            assert work.done(20.0)
            work.wait()
        assert {float(buffer[0]) for _, buffer in works} == {1.0, 3.0}
