"""Nodes of a Ray cluster as capacity."""

from __future__ import annotations

import pytest

from shoal.engines.ray import nodes as ray_nodes
from shoal.engines.ray.engine import RayOptions

BIG = {
    "total": {"CPU": 8.0, "GPU": 4.0, "memory": 64e9},
    "free": {"CPU": 5.0, "GPU": 1.0, "memory": 64e9},
    "labels": {},
}
SPOT = {"total": {"CPU": 4.0}, "free": {"CPU": 4.0}, "labels": {"market": "spot", ray_nodes.NODE_GROUP: "cheap"}}
HEAD = {"total": {}, "free": {}, "labels": {}}


@pytest.mark.parametrize(
    ("selector", "matches"),
    [("spot", True), ("!spot", False), ("in(od, spot)", True), ("!in(od,spot)", False), ("od", False), ("!od", True)],
)
def test_labels_are_matched_as_ray_matches_them(selector: str, matches: bool):
    assert ray_nodes.matches({"market": selector}, {"market": "spot"}) is matches


def test_waiting_allocation_says_what_it_waits_for():
    def why(**options: object) -> str:
        return ray_nodes.why_waiting(RayOptions(**options), [BIG, SPOT, HEAD]).partition(";")[0]

    assert why(labels={"market": "od"}) == "none of 3 nodes has the labels market=od"
    assert why(gpus=8.0) == "no node has CPU 1, GPU 8"
    assert why(gpus=2.0) == "CPU 1, GPU 2 is in use on the only node that has it"
    assert why(cpus=4.0) == "Ray is placing it"
    assert why(cpus=0.0) == "Ray is placing it"


def test_capacity_counts_allocations_by_kind_of_node():
    kinds = ray_nodes.capacity(RayOptions(cpus=2.0), [BIG, BIG, SPOT, HEAD])
    assert [(kind.kind, kind.count, kind.cpus) for kind in kinds] == [
        ("cheap", 2, 2),
        ("node with 8 CPUs, 4 GPUs", 4, 2),
        ("node with no CPUs", 0, 2),
    ]
    assert [bool(kind.why) for kind in kinds] == [False, False, True]


def test_capacity_of_full_and_unfit_nodes_says_why():
    (big, head) = ray_nodes.capacity(RayOptions(gpus=2.0, cpus=0.0), [BIG, HEAD])
    assert (big.count, big.why.partition(";")[0]) == (0, "GPU 2 is in use on the only node that has it")
    assert (head.count, head.why.partition(";")[0]) == (0, "no node has GPU 2")


def test_allocation_that_takes_nothing_fits_any_number_of_times():
    assert [kind.count for kind in ray_nodes.capacity(RayOptions(cpus=0.0), [BIG])] == [None]
