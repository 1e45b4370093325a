"""What sinfo prints, as offers."""

from __future__ import annotations

import pytest

from shoal.engines.slurm.nodes import mib, offers, parse, wanted_gpus

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
    return {one.kind: one.count for one in offers(parse(NODES), **needs)}


def test_an_offer_says_what_a_node_has_and_how_many_hires_have_a_place():
    low = next(one for one in offers(parse(NODES), cpus=4) if one.kind == "low")
    assert (low.count, low.cpus, low.gpus, low.memory_bytes) == (5, 16, 0, 64000 << 20)
    assert low.why == "1 allocated, 1 drained, 1 idle, 1 idle*, 1 mixed"


def test_what_a_hire_asks_for_decides_how_many_there_is_place_for():
    assert counts(cpus=16)["low"] == 1
    assert counts(cpus=4, memory_mib=5000)["low"] == 4, "a node is out of memory before it is out of CPUs"
    assert counts(cpus=1, gpus=2) == {"low": 0, "gpu (gpu:a100:4)": 3, "closed": 0}


def test_nodes_that_sleep_can_be_had_and_those_that_do_not_answer_cannot():
    assert counts(cpus=32)["gpu (gpu:a100:4)"] == 1
    assert counts(cpus=16)["low"] == 1


def test_a_partition_that_takes_no_jobs_offers_nothing():
    assert counts()["closed"] == 0


def test_what_is_no_line_of_ours_is_no_node():
    assert parse("PARTITION AVAIL\n\n") == []


@pytest.mark.parametrize(
    ("text", "found"), [("16G", 16384), ("500", 500), ("1024K", 1), ("2T", 2 << 20), ("", 0), ("x", 0)]
)
def test_memory_is_read_as_slurm_reads_it(text, found):
    assert mib(text) == found


@pytest.mark.parametrize(
    ("gpus", "gres", "found"),
    [(2, "", 2), ("a100:3", "", 3), (0, "gpu:a100:4", 4), (0, "gpu:2", 2), (0, "gpu", 1), (0, "tpu:2", 0), (0, "", 0)],
)
def test_gpus_are_counted_however_they_are_asked_for(gpus, gres, found):
    assert wanted_gpus(gpus, gres) == found
