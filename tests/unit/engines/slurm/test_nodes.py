"""Output of sinfo as capacity."""

from __future__ import annotations

import pytest

from shoal.engines.slurm.nodes import capacity, mib, parse, requested_gpus

NODES = """\
n1|low*|up|idle|0/16/0/16|64000|0|(null)|gpu:0|
n2|low*|up|mixed|12/4/0/16|64000|60000|(null)|gpu:0|
n3|low*|up|allocated|16/0/0/16|64000|64000|(null)|gpu:0|
n4|low*|up|idle*|0/16/0/16|64000|0|(null)|gpu:0|
n5|low*|up|drained|0/0/16/16|64000|0|(null)|gpu:0|
n6|gpu|up|mixed|8/24/0/32|128000|0|gpu:a100:4(S:0-1)|gpu:a100:1(IDX:0)|
n7|gpu|up|idle~|0/32/0/32|128000|0|gpu:a100:4(S:0-1)|gpu:a100:0(IDX:N/A)|
n1|closed|inact|idle|0/16/0/16|64000|0|(null)|gpu:0|
"""


def counts(**needs):
    return {kind.kind: kind.count for kind in capacity(parse(NODES), **needs)}


def test_capacity_has_the_size_of_nodes_and_the_number_of_allocations():
    low = next(kind for kind in capacity(parse(NODES), cpus=4) if kind.kind == "low")
    assert (low.count, low.cpus, low.gpus, low.memory_bytes) == (5, 16, 0, 64000 << 20)
    assert low.why == "1 allocated, 1 drained, 1 idle, 1 idle*, 1 mixed"


def test_size_of_allocations_limits_their_number():
    assert counts(cpus=16)["low"] == 1
    assert counts(cpus=4, memory_mib=5000)["low"] == 4, "a node is out of memory before it is out of CPUs"
    assert counts(cpus=1, gpus=2) == {"low": 0, "gpu (gpu:a100:4)": 3, "closed": 0}


def test_powered_down_nodes_count_and_unresponsive_ones_do_not():
    assert counts(cpus=32)["gpu (gpu:a100:4)"] == 1
    assert counts(cpus=16)["low"] == 1


def test_inactive_partition_has_no_capacity():
    assert counts()["closed"] == 0


def test_other_lines_are_ignored():
    assert parse("PARTITION AVAIL\n\n") == []


@pytest.mark.parametrize(
    ("text", "expected"), [("16G", 16384), ("500", 500), ("1024K", 1), ("2T", 2 << 20), ("", 0), ("x", 0)]
)
def test_memory_is_parsed_as_slurm_does(text, expected):
    assert mib(text) == expected


@pytest.mark.parametrize(
    ("gpus", "gres", "expected"),
    [(2, "", 2), ("a100:3", "", 3), (0, "gpu:a100:4", 4), (0, "gpu:2", 2), (0, "gpu", 1), (0, "tpu:2", 0), (0, "", 0)],
)
def test_gpus_are_counted_from_gpus_or_gres(gpus, gres, expected):
    assert requested_gpus(gpus, gres) == expected
