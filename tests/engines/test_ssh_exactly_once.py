"""Allocations over ssh start exactly once and end completely, whatever happens in between."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engines.ssh_hosts import why_not
from tests.engines.ssh_site import SshSite, ssh_site

from shoal.engines.ssh import engine as ssh_engine
from shoal.errors import AllocationRefused, EngineUnreachable

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

if why := why_not():
    pytest.skip(f"ssh hosts: {why}", allow_module_level=True)


def test_concurrent_submissions_start_an_allocation_once(tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1*4", "h2*4") as site:
        handles: list[str] = []
        threads = [
            threading.Thread(
                target=lambda one=one, allocation=allocation: handles.append(one.submit(site.request(allocation)))
            )
            for one in [site.engine() for _ in range(3)]
            for allocation in ("pool-1", "pool-2")
        ]
        with site.held_up("h1") as first, site.held_up("h2") as second:
            for thread in threads:
                thread.start()
            site.until(lambda: _waiting_for(first) == _waiting_for(second) == 3, "all to be about to start it")
        for thread in threads:
            thread.join(120)
        assert sorted(handles) == sorted(3 * [f"h{number}/{site.tag}/pool-{number}" for number in (1, 2)])
        site.until_agents("pool-1", "pool-2")
        assert len(site.agents_on("h1")) == len(site.agents_on("h2")) == 1


def test_allocation_whose_connection_broke_is_started_once(tmp_path: Path) -> None:
    """Break all connections of a host while it is about to start an agent, which it does afterwards."""
    with ssh_site(tmp_path, "h1", "h2") as site:
        engine = site.engine()
        assert engine.capacity()[0].count == 1
        with site.held_up("h1") as held:
            failed: list[BaseException] = []
            thread = threading.Thread(
                target=lambda: _note_failure(failed, lambda: engine.submit(site.request("pool-1")))
            )
            thread.start()
            site.until(lambda: _waiting_for(held), "h1 to be about to start it")
            site.network.stop_sshd("h1")
            thread.join(120)
            assert isinstance(failed[0], EngineUnreachable), failed
            with pytest.raises(EngineUnreachable, match="may have started pool-1"):
                engine.submit(site.request("pool-1"))
            site.network.start_sshd("h1")
        site.until_agents("pool-1")
        assert set(site.allocations(site.engine())) == {"pool-1"}, "one who knows nothing of it finds it"
        site.until(lambda: _submits(engine, site, "pool-1") == f"h1/{site.tag}/pool-1", "the doubt to end")
        assert not site.agents_on("h2")
        assert len(site.agents_on("h1")) == 1


def test_late_delivery_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ssh_site(tmp_path, "h1", "h2") as site:
        engine = site.engine()
        monkeypatch.setattr(ssh_engine, "START_WITHIN_S", 0.5)
        with site.held_up("h1") as held:
            handles: list[str] = []
            thread = threading.Thread(target=lambda: handles.append(engine.submit(site.request("pool-1"))))
            thread.start()
            site.until(lambda: _waiting_for(held), "h1 to be about to start it")
            # The other host has its time, however slow this machine is.
            monkeypatch.undo()
            time.sleep(2.0)
        thread.join(120)
        assert handles == [f"h2/{site.tag}/pool-1"]
        site.until_agents("pool-1")
        assert not site.agents_on("h1")


def test_agent_that_ignores_sigterm_is_killed_with_its_descendants(tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1") as site:
        engine = site.engine(setup=(*site.options["setup"], "setsid sleep 4711 &", "(sleep 4711 & sleep 4711) &"))
        handle = engine.submit(site.request("pool-1"))
        site.until_agents("pool-1")
        site.process("pool-1").suspend()
        engine.cancel(handle)
        assert not site.agents_on("h1")
        assert not site.network.running("h1", "4711")
        engine.cancel(handle)
        assert engine.watch(site.tag) == []


def test_orphans_of_a_cancelled_agent_are_killed(tmp_path: Path) -> None:
    with ssh_site(tmp_path, "h1") as site:
        engine, handle = _start_script(site, "trap 'exit 0' TERM; setsid sleep 4711 &", "while :; do wait; done")
        site.until(lambda: site.network.running("h1", "4711"), "it to start another")
        engine.cancel(handle)
        assert not site.network.running("h1", "4711")


@pytest.mark.parametrize("beside", ["sleep 4711 &", "setsid sleep 4711 &"])
def test_orphans_of_a_killed_agent_are_killed_by_cancel(tmp_path: Path, beside: str) -> None:
    with ssh_site(tmp_path, "h1") as site:
        engine = site.engine(setup=(*site.options["setup"], beside))
        handle = engine.submit(site.request("pool-1"))
        site.until_agents("pool-1")
        site.until(lambda: site.network.running("h1", "4711"), "it to start another")
        site.kill("pool-1")
        site.until(lambda: not site.allocations(engine), "it to be gone")
        engine.cancel(handle)
        assert not site.network.running("h1", "4711")


@pytest.mark.parametrize("differs", ["started", "boot"])
def test_process_that_reuses_the_pid_of_an_agent_is_spared(tmp_path: Path, differs: str) -> None:
    with ssh_site(tmp_path, "h1") as site:
        engine = site.engine()
        handle = engine.submit(site.request("pool-1"))
        site.until_agents("pool-1")
        note = site.home("h1", "pool-1") / "process.json"
        known = json.loads(note.read_text())
        note.write_text(json.dumps({**known, differs: {"started": known["started"] - 1, "boot": "another"}[differs]}))
        (seen,) = engine.watch(site.tag)
        assert seen.state == "gone"
        assert differs != "boot" or seen.why == "the host was rebooted"
        engine.cancel(handle)
        assert len(site.agents_on("h1")) == 1
        site.agents_on("h1")[0].kill()


def test_second_cancel_does_not_shorten_the_grace_period(tmp_path: Path) -> None:
    """Agents take a second SIGTERM as a request to end at once."""
    with ssh_site(tmp_path, "h1") as site:
        engine, handle = _start_script(site, "trap 'echo told >>$HOME/told' TERM", "while :; do sleep 0.1; done")
        threads = [threading.Thread(target=site.engine().cancel, args=(handle,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert (site.network.home("h1") / "told").read_text() == "told\n"
        assert not site.allocations(engine)


def _start_script(site: SshSite, first: str, then: str) -> tuple[ssh_engine.Ssh, str]:
    """Return an engine and the handle of an allocation that runs this script instead of an agent."""
    script = site.path / "script"
    script.write_text(f"#!/bin/bash\n{first}\ntouch $HOME/up\n{then}\n")
    script.chmod(0o755)
    engine = site.engine(setup=(f"exec {script}",))
    engine._connections["h1"].checked = True
    handle = engine.submit(site.request("pool-1"))
    site.until((site.network.home("h1") / "up").exists, "it to run")
    return engine, handle


def _waiting_for(path: Path) -> int:
    """Return how many processes wait for the lock of a file."""
    inode = str(os.stat(path).st_ino)
    return sum("->" in line and f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())


def _note_failure(into: list[BaseException], do: Callable[[], object]) -> None:
    try:
        do()
    except (EngineUnreachable, AllocationRefused) as error:
        into.append(error)


def _submits(engine: ssh_engine.Ssh, site: SshSite, allocation: str) -> str:
    try:
        return engine.submit(site.request(allocation))
    except EngineUnreachable:
        return ""
