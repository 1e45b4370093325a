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


def test_labels_choose_among_the_pools_that_were_named_in_their_order() -> None:
    assert fleet_requirements.matching(POOLS, ("dear", "lab", "cheap"), {"gpu": "a100"}) == ("dear", "cheap")
    assert fleet_requirements.matching(POOLS, ("dear", "cheap"), {"gpu": "a100", "zone": "b"}) == ("cheap",)


def test_without_names_all_pools_with_the_labels_are_taken_the_cheapest_first() -> None:
    assert fleet_requirements.matching(POOLS, (), {"gpu": "a100"}) == ("cheap", "dear")
    assert fleet_requirements.matching(POOLS, ("lab",), {}) == ("lab",)


def test_labels_that_no_pool_has_are_an_error_that_says_which_there_are() -> None:
    with pytest.raises(BadLabels) as caught:
        fleet_requirements.matching(POOLS, ("dear", "lab"), {"gpu": "h100"})
    assert caught.value.why == "dear has gpu=a100,zone=a; lab has no labels"


@pytest.mark.parametrize("text", ["gpu", "=a100", "gpu=", "gpu=a,gpu=b"])
def test_a_constraint_that_says_nothing_or_two_things_is_an_error(text: str) -> None:
    with pytest.raises(BadLabels):
        fleet_requirements.parse_where(text)


def test_a_machine_that_came_by_itself_will_do_unless_pools_or_labels_are_asked_for() -> None:
    assert fleet_requirements.admits(MachineRequirements(("spot",)), "", None)
    assert not fleet_requirements.admits(MachineRequirements(("spot",), pools_only=True), "", None)
    assert not fleet_requirements.admits(MachineRequirements(("spot",)), "lab", None)


def test_a_place_must_be_large_enough_if_its_size_is_known() -> None:
    asked = MachineRequirements(cpus=4, memory_bytes=2)
    assert fleet_requirements.admits(asked, "spot", SlotSize(4, 2))
    assert not fleet_requirements.admits(asked, "spot", SlotSize(4, 1))
    assert fleet_requirements.admits(asked, "ssh", None), "nobody could ask for one"


def test_a_role_that_is_larger_than_a_place_is_refused_before_anything_is_hired() -> None:
    pools = {"spot": PoolInfo("spot", "slurm", limit=4, slots=2, sized=True, cpus=4, memory_bytes=8 << 30)}
    fleet_requirements.check_size("trainer", MachineRequirements(("spot",), cpus=2, memory_bytes=4 << 30), pools)
    with pytest.raises(SlotTooSmall, match="a trainer needs 3 cpus, but a slot in pool spot has 2"):
        fleet_requirements.check_size("trainer", MachineRequirements(("spot",), cpus=3), pools)
    with pytest.raises(SlotTooSmall):
        fleet_requirements.check_size("server", MachineRequirements(("spot",), memory_bytes=5 << 30), pools)
