"""What roles ask of their machines: pools, labels and sizes."""

from __future__ import annotations

import pytest

from shoal.core.fleet import requirements as fleet_requirements
from shoal.core.fleet.requirements import MachineRequirements, SlotSize
from shoal.core.provisioning.events import PoolInfo
from shoal.errors import BadLabels, SlotTooSmall

A100 = PoolInfo("dear", "slurm", limit=4, price_per_h=4.0, labels={"gpu": "a100", "zone": "a"})
CHEAP = PoolInfo("cheap", "slurm", limit=4, price_per_h=1.0, labels={"gpu": "a100", "zone": "b"})
LAB = PoolInfo("lab", "ssh", limit=2)
POOLS = (A100, CHEAP, LAB)


def test_labels_select_named_pools_in_their_order() -> None:
    assert fleet_requirements.matching(POOLS, ("dear", "lab", "cheap"), {"gpu": "a100"}) == ("dear", "cheap")
    assert fleet_requirements.matching(POOLS, ("dear", "cheap"), {"gpu": "a100", "zone": "b"}) == ("cheap",)


def test_labels_without_names_select_the_cheapest_pools_first() -> None:
    assert fleet_requirements.matching(POOLS, (), {"gpu": "a100"}) == ("cheap", "dear")
    assert fleet_requirements.matching(POOLS, ("lab",), {}) == ("lab",)


def test_unmatched_labels_are_rejected_with_the_existing_ones() -> None:
    with pytest.raises(BadLabels) as caught:
        fleet_requirements.matching(POOLS, ("dear", "lab"), {"gpu": "h100"})
    assert caught.value.why == "dear has gpu=a100,zone=a; lab has no labels"


@pytest.mark.parametrize("text", ["gpu", "=a100", "gpu=", "gpu=a,gpu=b"])
def test_malformed_constraint_is_rejected(text: str) -> None:
    with pytest.raises(BadLabels):
        fleet_requirements.parse_where(text)


def test_agent_started_by_hand_is_admitted_unless_pools_are_required() -> None:
    assert fleet_requirements.admits(MachineRequirements(("spot",)), "", None)
    assert not fleet_requirements.admits(MachineRequirements(("spot",), pools_only=True), "", None)
    assert not fleet_requirements.admits(MachineRequirements(("spot",)), "lab", None)


def test_slot_of_known_size_must_be_large_enough() -> None:
    asked = MachineRequirements(cpus=4, memory_bytes=2)
    assert fleet_requirements.admits(asked, "spot", SlotSize(4, 2))
    assert not fleet_requirements.admits(asked, "spot", SlotSize(4, 1))
    assert fleet_requirements.admits(asked, "ssh", None), "no size could be requested"


def test_role_larger_than_a_slot_is_rejected_before_any_request() -> None:
    pools = {"spot": PoolInfo("spot", "slurm", limit=4, slots=2, sized=True, cpus=4, memory_bytes=8 << 30)}
    fleet_requirements.check_size("trainer", MachineRequirements(("spot",), cpus=2, memory_bytes=4 << 30), pools)
    with pytest.raises(SlotTooSmall, match="a trainer needs 3 cpus, but a slot in pool spot has 2"):
        fleet_requirements.check_size("trainer", MachineRequirements(("spot",), cpus=3), pools)
    with pytest.raises(SlotTooSmall):
        fleet_requirements.check_size("server", MachineRequirements(("spot",), memory_bytes=5 << 30), pools)
