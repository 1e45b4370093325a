"""Which server holds which part of the state, and what happens to it when servers come and go."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.placement import (
    PartAssignment,
    Placement,
    complete_copy,
    describe_uncopied,
    divide,
    drop_replica,
    initial,
    reassign,
    swap,
)


def names(count: int) -> list[str]:
    return [f"s{i}" for i in range(count)]


def complete(holdings: tuple[PartAssignment, ...]) -> tuple[PartAssignment, ...]:
    """The same when every learner has its copy."""
    return tuple(complete_copy(h, h.learner, h.since) or h for h in holdings)


def test_shards_have_nearly_the_same_bytes() -> None:
    shards = divide([100, 90, 50, 40, 30, 10], 3)
    loads = [sum([100, 90, 50, 40, 30, 10][i] for i in shard) for shard in shards]
    assert max(loads) - min(loads) <= 20
    assert sorted(i for shard in shards for i in shard) == list(range(6))


def test_more_shards_than_tensors_leave_some_empty() -> None:
    assert divide([8], 3) == ((0,), (), ())


def test_primaries_are_spread_and_learners_are_other_servers() -> None:
    holdings = initial(names(3), 4, 1)
    assert [h.primary for h in holdings] == ["s0", "s1", "s2", "s0"]
    assert all(h.learner and h.learner != h.primary for h in holdings)


def test_lone_server_has_no_backup() -> None:
    assert initial(["s0"], 2, 1) == (PartAssignment("s0"), PartAssignment("s0"))


def test_backup_replaces_a_lost_primary() -> None:
    holdings = complete(initial(names(2), 3, 1))
    left = reassign(holdings, ["s1"], (), 2)
    assert left is not None
    assert [h.primary for h in left] == ["s1", "s1", "s1"]
    assert not any(h.backup or h.learner for h in left)


def test_learner_never_becomes_primary() -> None:
    assert reassign(initial(names(2), 3, 1), ["s1"], (), 2) is None


def test_server_that_was_lost_and_returned_holds_nothing() -> None:
    holdings = complete(initial(names(2), 3, 1))
    found = reassign(holdings, ["s1"], ["s0"], 2)
    assert found is not None
    assert all((h.primary, h.backup, h.learner, h.since) == ("s1", "", "s0", 2) for h in found)


def test_report_of_an_old_learner_is_ignored() -> None:
    holding = PartAssignment("s0", learner="s1", since=5)
    assert complete_copy(holding, "s1", since=4) is None
    assert complete_copy(holding, "s2", since=5) is None
    assert complete_copy(holding, "s1", since=5) == PartAssignment("s0", "s1", since=5)


def test_server_that_leads_all_parts_hands_some_off() -> None:
    lopsided = tuple(PartAssignment("s0", "s1", since=1) for _ in range(4))
    found = reassign(lopsided, names(2), (), 2)
    assert found is not None
    assert sum(h.handing_off for h in found) == 2
    assert reassign(found, names(2), (), 3) == found, "it goes on handing over"
    rested = tuple(swap(h) if h.handing_off else h for h in found)
    assert sorted(h.primary for h in rested) == ["s0", "s0", "s1", "s1"]
    assert reassign(rested, names(2), (), 4) == rested


def test_leaving_server_hands_off_the_parts_it_leads() -> None:
    holdings = complete(initial(names(2), 2, 1))
    found = reassign(holdings, names(2), (), 2, leaving=["s0"])
    assert found is not None
    assert found[0] == replace(holdings[0], handing_off=True)
    assert found[1].backup == "", "a mere copy is not waited for: no other server could have one"


def test_leaving_server_keeps_its_copy_until_another_has_one() -> None:
    holdings = complete(initial(names(2), 2, 1))
    found = reassign(holdings, names(2), ["s2"], 2, leaving=["s0"])
    assert found is not None
    assert (found[1].primary, found[1].backup, found[1].learner) == ("s1", "s0", "s2")


def test_unreachable_backup_is_dropped() -> None:
    assert drop_replica(PartAssignment("s0", "s1", handing_off=True), "s1") == PartAssignment("s0")
    assert drop_replica(PartAssignment("s0", "s1", "s2"), "s2") == PartAssignment("s0", "s1")


def test_server_that_returns_gets_half_of_the_shards_again() -> None:
    for lost in names(2):
        rest = next(name for name in names(2) if name != lost)
        parts = reassign(complete(initial(names(2), 3, 1)), [rest], [], 2)
        assert parts is not None
        parts = reassign(parts, [rest], [lost], 3)
        for part in range(3):
            assert parts is not None
            copied = complete_copy(parts[part], lost, 3)
            assert copied is not None
            parts = reassign((*parts[:part], copied, *parts[part + 1 :]), names(2), [], 4 + part)
        assert parts is not None
        settled = [swap(a) if a.handing_off else a for a in parts]
        assert sorted(a.primary for a in settled[1:]) == names(2), f"after the loss of {lost}"


def test_parts_without_a_complete_copy_are_named() -> None:
    parts = initial(names(2), 3, 1)
    assert describe_uncopied(Placement(1, 1, (), parts)) == (
        "the ledger on s0 (being copied to s1), shard 1 on s1 (being copied to s0), shard 2 on s0 (being copied to s1)"
    )
    assert describe_uncopied(Placement(1, 1, (), complete(parts))) == ""
