"""Local engine with real agents."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal.engines import local, process_tree
from shoal.engines.engine import Engine, EngineOptions
from shoal.engines.local import Local
from shoal.errors import EngineUnreachable
from shoal.testing.engine_conformance import SCENARIOS, EngineSite

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]


class LocalSite(EngineSite):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._away = False

    def engine(self) -> Engine:
        site = self

        class Here(Local):
            def watch(self, tag: str) -> list:
                if site._away:
                    raise EngineUnreachable("the test has cut it off")
                return super().watch(tag)

        return Here("here", EngineOptions(directory=str(self.path / "home")))

    def kill(self, allocation: str) -> None:
        known = json.loads((self.path / "home" / "allocations" / self.tag / allocation / "process.json").read_text())
        psutil.Process(known["pid"]).kill()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        self._away = True
        yield
        self._away = False


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_local_engine_conforms(scenario: Callable[[EngineSite], None], tmp_path: Path) -> None:
    with LocalSite(tmp_path) as site:
        scenario(site)


def test_agent_without_a_record_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalSite(tmp_path) as site:
        with monkeypatch.context() as patch:
            patch.setattr(local, "_write_record", _die)
            with pytest.raises(KeyboardInterrupt):
                site.engine().submit(site.request("here-1"))
        site.until_agents("here-1")
        engine = site.engine()
        assert set(site.allocations(engine)) == {"here-1"}
        handle = engine.submit(site.request("here-1"))
        assert not (Path(handle) / "process.json").exists(), "it was started a second time"
        engine.cancel(handle)
        site.until(lambda: not process_tree.marked(handle), "it to be gone")
        assert site.allocations(engine) == {}


def _die(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("beside", ["sleep 4712 &", "setsid sleep 4712 &"])
@pytest.mark.parametrize("killed", [False, True])
def test_orphans_of_a_local_agent_end_with_it(tmp_path: Path, beside: str, killed: bool) -> None:
    with LocalSite(tmp_path) as site:
        script = tmp_path / "agent"
        script.write_text(f"#!/bin/bash\ntrap 'exit 0' TERM; {beside} while :; do wait; done\n")
        script.chmod(0o755)
        engine = Local("here", EngineOptions(directory=str(tmp_path / "home"), python=str(script)))
        handle = engine.submit(site.request("here-1"))
        site.until(lambda: _sleepers(handle), "it to start another")
        if killed:
            site.kill("here-1")
        engine.cancel(handle)
        site.until(lambda: not _sleepers(handle), "what it started to be gone")


def _sleepers(handle: str) -> list[psutil.Process]:
    """Return the processes that an allocation started, found by the file that each writes to."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if "4712" in process.cmdline() and os.readlink(f"/proc/{process.pid}/fd/1").startswith(handle):
                found.append(process)
    return found
