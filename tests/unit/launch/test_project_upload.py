"""Which files of a project are uploaded: never Shoal's own, and no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launch.project_upload import files_to_send


def test_files_of_shoal_are_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "project" / "mine"
    (home / "coordinators").mkdir(parents=True)
    (home / "coordinators" / "token").write_text("secret")
    (tmp_path / "project" / ".shoal").mkdir()
    (tmp_path / "project" / ".shoal" / "token").write_text("secret")
    (tmp_path / "project" / "train.py").write_text("")
    monkeypatch.setenv("SHOAL_HOME", str(home))
    assert set(files_to_send(tmp_path / "project", {"more": tmp_path})) == {"train.py", "more"}


def test_tokens_of_coordinators_and_users_are_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    root = tmp_path / "project"
    for name in (
        "srv/token",
        "srv/journal.jsonl",
        "srv/key.pem",
        "srv/tokens/ada",
        "lib/token",
        "ada.token",
        "train.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("secret")
    (root / "linked.token").symlink_to("ada.token")
    monkeypatch.chdir(root)
    assert set(files_to_send(root, {}, "ada.token")) == {"lib/token", "train.py"}


def test_token_file_of_the_environment_is_not_uploaded_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(tmp_path / "project" / "ada.token"))
    (tmp_path / "project").mkdir()
    for name in ("ada.token", "train.py"):
        (tmp_path / "project" / name).write_text("secret")
    assert set(files_to_send(tmp_path / "project", {})) == {"train.py"}
