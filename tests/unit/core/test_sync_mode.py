"""Sync modes: the texts of the setting."""

from __future__ import annotations

import pytest

from shoal.core.sync_mode import SyncMode, parse
from shoal.errors import BadSync


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step", SyncMode("step", served=False)),
        ("async", SyncMode("async", served=True)),
        ("stale:0", SyncMode("stale:0", served=True, bound=0)),
        ("stale:4", SyncMode("stale:4", served=True, bound=4)),
        ("local:16", SyncMode("local:16", served=False, local=16)),
    ],
)
def test_text_names_a_mode(text: str, expected: SyncMode) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "Step", "stale", "stale:", "stale:-1", "stale:1.5", "local:0", "local", "async:1", "stale:٣"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BadSync, match="unknown sync mode"):
        parse(text)
