"""Tokens of the coordinator and its users."""

from __future__ import annotations

from pathlib import Path

from shoal.coordinator.http.tokens import FOLDER, OWNER, REREAD_S, TokenStore
from shoal.wire import credentials


def test_token_file_takes_effect_within_the_reread_interval(tmp_path: Path) -> None:
    now = 0.0
    tokens = TokenStore(tmp_path, "own", clock=lambda: now)
    assert tokens.user_of(b"Bearer own") == OWNER
    assert tokens.user_of(b"Bearer adas-token") is None
    (tmp_path / FOLDER).mkdir()
    credentials.write(tmp_path / FOLDER / "ada", credentials.Credentials("adas-token"))
    assert tokens.user_of(b"Bearer adas-token") is None
    now += REREAD_S
    assert tokens.user_of(b"Bearer adas-token") == "ada"
