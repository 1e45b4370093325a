"""Record of a member's uncaught exception."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.agent.processes import child_main
from shoal.errors import PeerUnreachable


def record(tmp_path: Path, error: BaseException) -> dict[str, object]:
    child_main._record(str(tmp_path / "why.json"), error)
    recorded: dict[str, object] = json.loads((tmp_path / "why.json").read_text())
    return recorded


def test_exception_is_recorded_with_its_kind_and_code(tmp_path: Path) -> None:
    recorded = record(tmp_path, PeerUnreachable("silent for 3 s"))
    assert (recorded["kind"], recorded["text"], recorded["code"]) == ("PeerUnreachable", "silent for 3 s", "S204")
    recorded = record(tmp_path, SystemExit("no data"))
    assert (recorded["kind"], recorded["text"], recorded["code"]) == ("SystemExit", "no data", "")


def test_text_that_utf8_cannot_encode_is_replaced(tmp_path: Path) -> None:
    assert record(tmp_path, ValueError("file \udcff"))["text"] == "file ?"


def test_full_disk_loses_only_the_record(tmp_path: Path) -> None:
    child_main._record(str(tmp_path / "absent" / "why.json"), ValueError("bad"))
