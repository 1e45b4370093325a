"""The pictures of the documentation are those that the code draws."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "pictures.py"


def test_pictures_are_up_to_date() -> None:
    assert runpy.run_path(str(SCRIPT))["main"](["--check"]) == 0


def test_loss_shows_the_world_that_replaces_the_broken_one() -> None:
    assert "FormWorld" in runpy.run_path(str(SCRIPT))["loss"]()
