"""Agents on this machine, as an engine starts them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal.engines.engine import Engine, Options
from shoal.engines.local import Local
from shoal.errors import EngineUnreachable
from shoal.testing.engines import SCENARIOS, Site

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(180)]


class LocalSite(Site):
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

        return Here("here", Options(directory=str(self.path / "home")))

    def kill(self, hire: str) -> None:
        known = json.loads((self.path / "home" / "hires" / self.tag / hire / "process.json").read_text())
        psutil.Process(known["pid"]).kill()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        self._away = True
        yield
        self._away = False


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_this_machine_does_what_engines_do(scenario: Callable[[Site], None], tmp_path: Path) -> None:
    with LocalSite(tmp_path) as site:
        scenario(site)
