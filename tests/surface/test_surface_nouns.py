"""Texts that users read count with `core/nouns`: no text says "1 members"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
# "it restarts", "it runs" and "it steps parameters" are verbs.
UNCOUNTED = re.compile(r" (members|trainers|servers|steps(?! parameters)|slots|machines|processes|checkpoints|files)\b")


def _uncounted(path: Path) -> list[str]:
    """Return the lines of f-strings in which a plural follows a value at once."""
    texts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.JoinedStr)]
    return [
        f"{path.relative_to(SOURCE)}:{after.lineno}"
        for text in texts
        for value, after in zip(text.values, text.values[1:], strict=False)
        if isinstance(value, ast.FormattedValue)
        and isinstance(after, ast.Constant)
        and UNCOUNTED.match(str(after.value))
    ]


def test_plural_nouns_follow_their_count() -> None:
    paths = [path for path in SOURCE.rglob("*.py") if "testing" not in path.parts]
    assert [line for path in paths for line in _uncounted(path)] == [], "use counted() or bounded() of core/nouns"
