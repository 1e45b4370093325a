"""Ssh engine on real hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engines.ssh_hosts import ssh_network, why_not
from tests.engines.ssh_site import SshSite, ssh_site

from shoal.engines.engine import AllocationStatus
from shoal.errors import AllocationRefused, EngineUnreachable, PoolFull
from shoal.testing.engine_conformance import SCENARIOS, EngineSite

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

if why := why_not():
    pytest.skip(f"ssh hosts: {why}", allow_module_level=True)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_ssh_engine_conforms(scenario: Callable[[EngineSite], None], tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1*2", "h2*2") as site:
        scenario(site)


def test_host_without_power_is_lost_after_a_while_and_others_continue(tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1", "h2", connect_timeout_s=5.0, lost_after_s=600.0) as site:
        engine = site.engine()
        assert [engine.submit(site.request(allocation)) for allocation in ("pool-1", "pool-2")] == [
            f"h1/{site.tag}/pool-1",
            f"h2/{site.tag}/pool-2",
        ]
        site.until_agents("pool-1", "pool-2")
        site.network.power_off("h1")
        site.until(lambda: "h1 does not answer" in site.allocations(engine)["pool-1"].why, "the silence of h1")
        seen = site.allocations(engine)
        assert {one.state for one in seen.values()} == {"running"}, "what may still run is not given up at once"
        assert engine.submit(site.request("pool-1")) == seen["pool-1"].handle, "what may still run is not started again"
        assert [offer.count for offer in engine.capacity()] == [0, 0]
        with pytest.raises(EngineUnreachable, match="h1 does not answer"):
            engine.cancel(seen["pool-1"].handle)
        with pytest.raises(PoolFull) as refused:
            engine.submit(site.request("pool-3"))
        assert "h1 does not answer" in refused.value.why
        assert "1 of at most 1 allocation running" in refused.value.why
        engine._connections["h1"].silent_since -= 601.0
        assert set(site.allocations(engine)) == {"pool-2"}, "h1 is taken as lost"
        site.until_agents("pool-2")
        site.network.boot("h1")
        site.network.heal("h1")
        site.until(lambda: any(offer.count for offer in engine.capacity()), "h1 to be back")
        assert engine.submit(site.request("pool-4")).startswith("h1/")
        site.until_agents("pool-2", "pool-4")


def test_agents_of_a_partitioned_host_survive_the_partition(tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1", "h2", connect_timeout_s=5.0) as site:
        engine = site.engine()
        handles = {allocation: engine.submit(site.request(allocation)) for allocation in ("pool-1", "pool-2")}
        site.until_agents("pool-1", "pool-2")
        before = site.process("pool-2").pid
        site.network.cut("h2")
        site.until(lambda: site.allocations(engine)["pool-2"].why, "the engine to see that h2 is silent")
        assert {one.state for one in site.allocations(engine).values()} == {"running"}
        site.network.heal("h2")
        site.until(lambda: not site.allocations(engine)["pool-2"].why, "h2 to answer again")
        assert {allocation: one.handle for allocation, one in site.allocations(engine).items()} == handles
        site.until_agents("pool-1", "pool-2")
        assert site.process("pool-2").pid == before


def test_hanging_host_does_not_delay_the_others(tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1", "h2", connect_timeout_s=5.0) as site:
        engine = site.engine()
        handles = {allocation: engine.submit(site.request(allocation)) for allocation in ("pool-1", "pool-2")}
        site.until_agents("pool-1", "pool-2")
        hung = site.network.sshds("h2")
        for process in hung:
            process.suspend()
        seen = site.allocations(engine)
        assert {allocation: one.handle for allocation, one in seen.items()} == handles
        assert "h2 does not answer: no reply within" in seen["pool-2"].why
        assert not seen["pool-1"].why
        for process in hung:
            process.resume()
        site.until(lambda: not site.allocations(engine)["pool-2"].why, "h2 to answer again")


def test_host_behind_another_is_reached_by_a_jump(tmp_path: Path) -> None:
    with ssh_network(tmp_path / "net", "h1") as network:
        network.boot("h2", sshd=f"AllowUsers root@{network.address('h1')}")
        with SshSite(tmp_path, network, "h2", jump="h1") as site:
            with pytest.raises(AllocationRefused, match="authentication failed on h2"):
                site.engine(jump="").submit(site.request("pool-1"))
            engine = site.engine()
            engine.submit(site.request("pool-1"))
            site.until_agents("pool-1")
            assert [one.handle for one in engine.watch(site.tag)] == [f"h2/{site.tag}/pool-1"]
            engine.close()
            assert not site.connections(), "connections stay when the engine is closed"


def test_token_is_private_and_does_not_outlive_its_agent(tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1*2") as site:
        engine = site.engine()
        engine.submit(site.request("pool-1"))
        engine.submit(site.request("pool-2"))
        site.until_agents("pool-1", "pool-2")
        token = site.home("h1", "pool-1") / "token"
        assert [path.stat().st_mode & 0o777 for path in (token, *list(token.parents)[:3])] == [0o600, *3 * [0o700]]
        secret = site.request("pool-1").credentials.token
        assert secret in token.read_text()
        for process in site.network.running("h1", "shoal.agent"):
            assert secret not in " ".join([*process.cmdline(), *process.environ().values()])
        others = [path for path in site.network.home("h1").rglob("*") if path.is_file() and path.name != "token"]
        assert not [path for path in others if secret in path.read_text(errors="replace")]
        engine.cancel(f"h1/{site.tag}/pool-1")
        assert not token.exists()
        site.kill("pool-2")
        site.until(lambda: not site.allocations(engine), "the engine to see that it was killed")
        assert not list(site.network.home("h1").rglob("token*"))


def test_hosts_with_a_shared_home_are_distinguished(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with ssh_site(tmp_path, "h1", "h2", directory=str(shared)) as site:
        engine = site.engine()
        handles = {allocation: engine.submit(site.request(allocation)) for allocation in ("pool-1", "pool-2")}
        site.until_agents("pool-1", "pool-2")
        assert {allocation: one.handle for allocation, one in site.allocations(site.engine()).items()} == handles
        engine.cancel(handles["pool-2"])
        site.until_agents("pool-1")
        assert set(site.allocations(engine)) == {"pool-1"}
        homes = shared / "allocations" / site.tag
        for path in homes.rglob("*"):
            os.utime(path, (0.0, 0.0))
        engine.clean_up(site.tag, ())
        assert [home.name for home in homes.iterdir()] == ["pool-1"], "what is left of the other is removed"


def test_allocations_of_other_coordinators_take_room(tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1") as site:
        mine, other = site.tag, f"{site.tag}-other"
        engine = site.engine()
        handle = engine.submit(site.request("pool-1"))
        site.until_agents("pool-1")
        site.tag = other
        later = site.engine()
        assert later.capacity()[0].count == 0
        with pytest.raises(PoolFull, match="no host of pool lab takes pool-2"):
            later.submit(site.request("pool-2"))
        assert later.watch(other) == []
        engine.cancel(handle)
        assert later.submit(site.request("pool-2")) == f"h1/{other}/pool-2"
        assert engine.watch(mine) == []


def test_ended_agent_says_why(tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1") as site:
        engine = site.engine()
        engine.submit(site.request("pool-1"))
        site.until_agents("pool-1")
        ask = site.request("pool-1")
        site.kill("pool-1")
        site.until(lambda: not site.allocations(engine), "it to be gone")
        wrong = replace(ask, allocation="pool-2", credentials=replace(ask.credentials, token="wrong"))
        engine.submit(wrong)
        found: list[AllocationStatus] = []

        def ended() -> bool:
            found[:] = [one for one in engine.watch(site.tag) if one.allocation == "pool-2" and one.state == "gone"]
            return bool(found)

        site.until(ended, "an agent with a wrong token to end")
        assert "error[S201]" in found[0].why
