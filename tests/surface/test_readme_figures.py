"""README's figures are those of the result pages that it links."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "readme_figures.py"


def test_readme_figures_equal_the_result_pages() -> None:
    assert runpy.run_path(str(SCRIPT))["main"](["--check"]) == 0


def test_a_changed_figure_is_noticed() -> None:
    script = runpy.run_path(str(SCRIPT))
    filled = script["fill"]("<!-- figures: recovery -->\nold\n<!-- end of figures -->", {"recovery": "new"})
    assert filled == "<!-- figures: recovery -->\nnew\n<!-- end of figures -->"
