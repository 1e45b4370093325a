"""What Shoal asks of a script, in lines: the plain examples against the elastic ones."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def code_of(file: Path) -> list[str]:
    """The lines of a script without its docstring and blank lines, which say what it is and not what it does."""
    text = file.read_text()
    start = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[start:] if line.strip()]


def changed(plain: list[str], elastic: list[str]) -> list[str]:
    """The lines that were changed, added or removed; of a piece that got longer or shorter, the longer side."""
    found: list[str] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, plain, elastic, autojunk=False).get_opcodes():
        if kind != "equal":
            found += max(plain[a:b], elastic[c:d], key=len)
    return found


@pytest.mark.parametrize(
    ("name", "import_", "most"),
    [
        ("torch_images", "import shoal.torch as shoal", 5),
        ("keras_images", "import shoal.keras as shoal", 2),
        ("keras_text", "import shoal.keras as shoal", 2),
    ],
)
def test_a_script_becomes_elastic_in_a_few_lines(name: str, import_: str, most: int) -> None:
    lines = changed(code_of(EXAMPLES / f"{name}_plain.py"), code_of(EXAMPLES / f"{name}.py"))
    assert lines[0] == import_
    assert 1 < len(lines) <= most, "\n".join(lines)


def test_every_kind_of_change_is_counted() -> None:
    plain = ["a", "b", "c", "d", "e", "f"]
    assert changed(plain, plain) == []
    assert changed(plain, ["a", "b", "new", "c", "d", "e", "f"]) == ["new"]
    assert changed(plain, ["a", "c", "d", "e", "f"]) == ["b"]
    assert len(changed(plain, ["a", "B", "C", "more", "d", "E", "f"])) == 4


def test_torch_and_keras_are_shown_side_by_side() -> None:
    torch, keras = (code_of(EXAMPLES / f"{name}_images.py") for name in ("torch", "keras"))
    alike = ('parser.add_argument("--epochs', 'parser.add_argument("--size', "args", "digits", "print")
    assert [line for line in torch if line.startswith(alike)] == [line for line in keras if line.startswith(alike)]
