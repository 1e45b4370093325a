"""What scripts may ask of an evaluator, and what their functions may return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.runs.evaluation import parse
from shoal.errors import BadEvaluation, StoreUnusable
from shoal.worker.evaluation import evaluate as el


@pytest.mark.parametrize(
    "result", [None, 0.9, [0.9], {}, {"loss": "low"}, {"loss": "0.5"}, {"loss": np.zeros(2)}, {"loss": None}]
)
def test_what_is_no_dict_of_numbers_is_refused(result: Any) -> None:
    with pytest.raises(BadEvaluation):
        el.numbers_of(result, None)


def test_whatever_can_be_a_number_is_one() -> None:
    assert el.numbers_of({"a": np.float32(0.5), "b": 3, "c": np.array(1.5)}, None) == {"a": 0.5, "b": 3.0, "c": 1.5}


def test_a_goal_must_be_among_what_is_returned() -> None:
    with pytest.raises(BadEvaluation, match="accuracy should decide") as raised:
        el.numbers_of({"loss": 1.0}, parse("max:accuracy"))
    assert raised.value.why == "it returned loss"


@pytest.mark.parametrize(
    "asked",
    [
        {"patience": 3},
        {"export": "best.pt"},
        {"best": "accuracy"},
        {"best": "max:accuracy", "patience": 0},
        {"best": "max:accuracy", "patience": 1.5},
        {"best": "max:accuracy", "patience": True},
    ],
)
def test_a_wish_that_cannot_be_fulfilled_is_refused_before_the_training(asked: dict[str, Any]) -> None:
    with pytest.raises(BadEvaluation):
        el.wish(dict, **{"best": None, "patience": None, "export": None} | asked)


def test_only_a_function_can_evaluate() -> None:
    with pytest.raises(BadEvaluation, match="a dict cannot evaluate"):
        el.wish({"loss": 1.0}, None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_an_export_that_fails_leaves_the_one_before(tmp_path: Path, kind: type[Exception]) -> None:
    path = tmp_path / "best.pt"
    el.export(str(path), lambda part: Path(part).write_text("first"))

    def half(part: str) -> None:
        Path(part).write_text("sec")
        raise kind("the disk is full")

    with pytest.raises(StoreUnusable, match="could not be written"):
        el.export(str(path), half)
    assert [one.name for one in tmp_path.iterdir()] == ["best.pt"]
    assert path.read_text() == "first"


def test_an_export_makes_its_folder_and_keeps_its_ending(tmp_path: Path) -> None:
    seen = []
    el.export(str(tmp_path / "a" / "best.keras"), lambda part: seen.append(part) or Path(part).write_text(""))
    assert seen[0].endswith(".part.keras")
    assert (tmp_path / "a" / "best.keras").exists()
