"""How often a service that dies is restarted."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal import exit_codes
from shoal.errors import ServiceFailed
from shoal.launch.child_service import RESTARTS, ChildService, last_lines, restart_delay_s


def test_restart_delay_grows_and_ends() -> None:
    deaths = [float(n) for n in range(RESTARTS + 1)]
    delays = [restart_delay_s(deaths[: n + 1], now=deaths[n]) for n in range(RESTARTS + 1)]
    assert delays[0] == 0.0
    assert delays[-1] is None
    waits = [delay for delay in delays if delay is not None]
    assert waits == sorted(waits)


def test_old_deaths_do_not_count() -> None:
    assert restart_delay_s([float(n) for n in range(20)] + [1000.0], now=1000.0) == 0.0


def test_last_lines_of_a_log_are_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == ""
    log.write_text("".join(f"{number}\n" for number in range(100)))
    assert [line.strip() for line in last_lines(log, 2).splitlines()] == ["98", "99"]


def test_service_that_refuses_its_settings_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        returncode = exit_codes.BAD_SETTING

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options["stdout"].write(b"error[S117]: unknown notice source")

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(subprocess, "Popen", Refusing)
    service = ChildService("agent", ["agent"], tmp_path / "log")
    service.start()
    with pytest.raises(ServiceFailed, match="cannot run with these settings") as caught:
        service.restart_if_dead()
    service.close_lifeline()
    assert "S117" in caught.value.why
