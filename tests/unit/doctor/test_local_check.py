"""Checks of this machine."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.doctor.local_check import check_machine


def verdict_of(what: str, home: Path, ports: str = "") -> tuple[str, str]:
    (check,) = [check for check in check_machine(home, ports) if check.what == what]
    return check.verdict, check.finding


def test_each_check_has_a_verdict_and_nothing_is_created(tmp_path: Path) -> None:
    home = tmp_path / "not" / "yet"
    subjects = [check.what for check in check_machine(home, "")]
    assert subjects == ["python", "torch", "loopback", "ports", "SHOAL_HOME", "disk", "clock", "name", "/dev/shm"]
    assert not list(tmp_path.iterdir())


def test_unwritable_home_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert verdict_of("SHOAL_HOME", tmp_path / "file")[0] == "bad"


def test_port_range_that_is_in_use_is_bad(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert verdict_of("ports", tmp_path, f"{port}-{port}") == ("bad", f"0 of 1 free in {port}-{port}")


@pytest.mark.parametrize(
    ("free", "verdict", "size"),
    [(2 << 20, "bad", "2 MiB"), (1 << 30, "warning", "1.0 GiB"), (3 << 30, "good", "3.0 GiB")],
)
def test_disk_is_judged_as_on_machines_of_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, verdict: str, size: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert verdict_of("disk", tmp_path) == (verdict, f"{size} free for {tmp_path}")
