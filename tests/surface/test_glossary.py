"""The glossary names what is there."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

GLOSSARY = tomllib.loads((Path(__file__).parents[2] / "docs" / "glossary.toml").read_text())
TERMS = [term for term in GLOSSARY["term"] if "code" in term]


@pytest.mark.parametrize("code", [term["code"] for term in TERMS])
def test_glossary_code_exists(code: str) -> None:
    module, _, name = code.partition(":")
    assert not name or hasattr(importlib.import_module(module), name)


def test_no_word_of_the_glossary_is_banned() -> None:
    words = {word.strip() for term in GLOSSARY["term"] for word in term["word"].replace(":", ",").split(",")}
    banned = {word for entry in (*GLOSSARY["term"], *GLOSSARY["words"]) for word in entry.get("not", ())}
    assert not words & banned
