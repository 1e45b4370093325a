"""CONTRIBUTING names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
CHANGES = TEXT[TEXT.index("## Where do I change X?") : TEXT.index("## Tests")]
PATHS = sorted({path for path in re.findall(r"`([\w./]+)`", CHANGES) if "/" in path or path.endswith(".py")})


@pytest.mark.parametrize("path", PATHS)
def test_path_in_contributing_exists(path: str) -> None:
    folders = {(ROOT / match).parent for match in PATHS if match.endswith(".py")}
    bases = [ROOT, ROOT / "src" / "shoal", *(ROOT / "src" / "shoal" / folder.relative_to(ROOT) for folder in folders)]
    assert any((base / path).exists() for base in bases), path
