"""What `shoal fetch` prints."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.verbs.fetch import text
from shoal.launch.download import DownloadResult


def test_long_listing_is_cut() -> None:
    many = DownloadResult(tuple(f"f{number}" for number in range(30)), 1, 2)
    shown = text(many, Path("to"), "")
    assert shown.startswith("downloaded f0, f1,")
    assert shown.endswith("… to to; 2 files already up to date")


def test_run_without_outputs_is_reported() -> None:
    shown = text(DownloadResult((), 0, 0), Path("to"), "/home/user/project")
    assert shown.startswith("nothing to download")
    assert shown.endswith("members on this machine write to /home/user/project")
