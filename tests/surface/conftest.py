"""Compares a public surface with its frozen text and shows the difference."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

FROZEN = Path(__file__).parent / "frozen"


@pytest.fixture
def frozen() -> Callable[[str, str], None]:
    """`frozen(name, text)` fails with a diff if `text` is not what tests/surface/frozen/name holds.

    `make surface` (SHOAL_FREEZE=1) rewrites the files, so that a review shows every change of the surface.
    """

    def same(name: str, text: str) -> None:
        file = FROZEN / name
        text = text.rstrip("\n") + "\n"
        if os.environ.get("SHOAL_FREEZE"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        held = file.read_text() if file.exists() else ""
        diff = "\n".join(
            difflib.unified_diff(held.splitlines(), text.splitlines(), f"frozen {name}", "now", lineterm="")
        )
        assert not diff, f"the public surface changed; if that is meant, run `make surface` and commit it\n{diff}"

    return same
