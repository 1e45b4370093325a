"""Several hosts train over a network, which is cut and healed, and die whole."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.netns.hosts import COORDINATOR, hosted
from tests.netns.network import Network

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]

LEASE_S = 2.0
# Bounds the wait for a world without the lost one, beyond the lease: far more than it takes, on a busy machine.
SLACK_S = 8.0
# Longer than a coordinator waits for a silent process, and then for its agent: who is only cut off is not replaced.
LONG_S, VERY_LONG_S = 14.0, 22.0
SETTINGS = (f"lease_s={LEASE_S}",)


def test_three_hosts_train_as_one_member_would(network: Network, tmp_path: Path) -> None:
    with hosted(network, tmp_path, 3, "3:3", epochs=4) as run:
        run.finish()
        run.check()
        assert {c["member"] for c in run.commits()} == {"h1/0", "h2/0", "h3/0"}
        assert run.access[1].startswith("https://"), "off loopback the coordinator speaks TLS"
        hellos = [
            e["fields"] for e in run.journal() if e["fields"].get("member") == "h2/0" and "address" in e["fields"]
        ]
        assert {hello["address"]["host"] for hello in hellos} == {network.address("h2")}


def test_partitioned_host_is_dropped_and_rejoins_when_healed(network: Network, tmp_path: Path) -> None:
    with hosted(network, tmp_path, 3, "1:3", SETTINGS, pause_s=0.05, epochs=60) as run:
        run.until_size(3)
        run.until_step(run.step() + 5)
        network.cut("h3")
        cut_at = time.time()
        run.until_size(2)
        resumed_at = min(c["at"] for c in run.commits() if c["size"] == 2 and c["at"] > cut_at)
        assert resumed_at - cut_at < LEASE_S + SLACK_S
        time.sleep(LONG_S)
        healed_at = time.time()
        network.heal("h3")
        run.until_size(3)
        run.check_steps_follow("h1/0", "h2/0")
        check_left_behind(run.commits(), "h3/0", cut_at, healed_at)
        assert len(run.lives("h3/0")) == 1, "the member that was cut off was replaced"
        run.finish()
        run.check()


def test_training_continues_while_the_coordinator_is_partitioned(network: Network, tmp_path: Path) -> None:
    with hosted(network, tmp_path, 3, "2:3", SETTINGS, pause_s=0.05, epochs=60) as run:
        run.until_size(3)
        run.until_step(run.step() + 5)
        world = run.commits()[-1]["world"]
        network.cut(COORDINATOR)
        at = run.step()
        time.sleep(VERY_LONG_S)
        run.until_step(at + 20)
        assert run.commits()[-1]["world"] == world, "the world changed without a coordinator"
        network.heal(COORDINATOR)
        run.until_step(run.step() + 40)
        run.until_size(3)
        assert [len(run.lives(f"h{i}/0")) for i in (1, 2, 3)] == [1, 1, 1]
        run.stop()


def test_coordinator_partitioned_for_longer_than_a_lease_keeps_all_members(network: Network, tmp_path: Path) -> None:
    with hosted(network, tmp_path, 3, "2:3", SETTINGS, pause_s=0.05, epochs=60) as run:
        run.until_size(3)
        run.until_step(run.step() + 5)
        network.cut(COORDINATOR)
        time.sleep(3 * LEASE_S)
        hellos = len(run.journal("MemberConnected"))
        network.heal(COORDINATOR)
        run.until(lambda: len(run.journal("MemberConnected")) >= hellos + 3, "all to find the coordinator again")
        run.until_step(run.step() + 40)
        assert not run.journal("MemberLost")
        assert len({c["world"] for c in run.commits() if c["size"] == 3}) == 1, "the world was formed again"
        run.stop()


def test_member_lost_during_a_coordinator_partition_is_resolved_when_healed(network: Network, tmp_path: Path) -> None:
    with hosted(network, tmp_path, 3, "2:3", SETTINGS, pause_s=0.05, epochs=60) as run:
        run.until_size(3)
        run.until_step(run.step() + 5)
        network.cut(COORDINATOR)
        run.power_off("h2")
        time.sleep(2 * LEASE_S)
        assert run.world_size() == 3, "a world formed without a coordinator"
        network.heal(COORDINATOR)
        run.until_size(2)
        run.check_steps_follow("h1/0", "h3/0")
        run.stop()


def test_host_that_dies_costs_no_step_and_rejoins_when_it_is_back(network: Network, tmp_path: Path) -> None:
    with hosted(network, tmp_path, 3, "2:3", SETTINGS, pause_s=0.05, epochs=60) as run:
        run.until_size(3)
        run.until_step(run.step() + 5)
        run.power_off("h2")
        died_at = time.time()
        run.until_size(2)
        assert run.commits()[-1]["at"] - died_at < LEASE_S + SLACK_S
        network.heal("h2")
        network.wait_for(COORDINATOR, "h2")
        run.boot("h2")
        run.until_size(3)
        run.check_steps_follow("h1/0", "h3/0")
        assert len(run.lives("h2/0")) == 2
        run.stop()


def check_left_behind(commits: list[dict[str, Any]], member: str, cut_at: float, healed_at: float) -> None:
    """Who was cut off applied nothing that the others did not, and no step by itself."""
    alone = [c for c in commits if c["member"] == member and cut_at < c["at"] < healed_at]
    assert all(c["size"] == 3 for c in alone), "the member that was cut off trained on by itself"
    assert len(alone) <= 2, "the member that was cut off trained on"
