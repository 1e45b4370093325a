"""Arguments of `run.evaluate`, results of evaluation functions, and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.runs.evaluation import parse
from shoal.errors import BadEvaluation, NoCheckpoint, StoreUnusable
from shoal.worker.evaluation import evaluate


@pytest.mark.parametrize(
    "result", [None, 0.9, [0.9], {}, {"loss": "low"}, {"loss": "0.5"}, {"loss": np.zeros(2)}, {"loss": None}]
)
def test_result_that_is_not_a_dict_of_numbers_is_refused(result: Any) -> None:
    with pytest.raises(BadEvaluation):
        evaluate.check_scores(result, None)


def test_scalars_of_numpy_become_floats() -> None:
    scores = evaluate.check_scores({"a": np.float32(0.5), "b": 3, "c": np.array(1.5)}, None)
    assert scores == {"a": 0.5, "b": 3.0, "c": 1.5}


def test_metric_of_the_goal_must_be_in_the_result() -> None:
    with pytest.raises(BadEvaluation, match="did not return accuracy") as raised:
        evaluate.check_scores({"loss": 1.0}, parse("max:accuracy"))
    assert raised.value.why == "it returned loss"


@pytest.mark.parametrize(
    "arguments",
    [
        {"patience": 3},
        {"export": "best.pt"},
        {"best": "accuracy"},
        {"best": "max:accuracy", "patience": 0},
        {"best": "max:accuracy", "patience": 1.5},
        {"best": "max:accuracy", "patience": True},
    ],
)
def test_invalid_arguments_are_refused_before_training(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadEvaluation):
        evaluate.evaluation_request(dict, **{"best": None, "patience": None, "export": None} | arguments)


def test_only_a_function_can_evaluate() -> None:
    with pytest.raises(BadEvaluation, match="a dict cannot evaluate"):
        evaluate.evaluation_request({"loss": 1.0}, None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_failed_export_leaves_the_previous_file(tmp_path: Path, kind: type[Exception]) -> None:
    path = tmp_path / "best.pt"
    evaluate.export_model(str(path), lambda part: Path(part).write_text("first"))

    def fail_halfway(part: str) -> None:
        Path(part).write_text("sec")
        raise kind("the disk is full")

    with pytest.raises(StoreUnusable, match="could not be written"):
        evaluate.export_model(str(path), fail_halfway)
    assert [file.name for file in tmp_path.iterdir()] == ["best.pt"]
    assert path.read_text() == "first"


def test_export_creates_its_folder_and_keeps_the_suffix(tmp_path: Path) -> None:
    parts = []

    def write(part: str) -> None:
        parts.append(part)
        Path(part).write_text("")

    evaluate.export_model(str(tmp_path / "a" / "best.keras"), write)
    assert parts[0].endswith(".part.keras")
    assert (tmp_path / "a" / "best.keras").exists()


@pytest.mark.parametrize(
    ("announced", "newest"), [(None, None), ((5, float("inf")), None), ((5, 0.0), (5, 1)), ((5, 0.0), (6, 1))]
)
def test_checkpoint_that_is_visible_or_recent_is_fine(
    announced: tuple[int, float] | None, newest: tuple[int, int] | None
) -> None:
    evaluate._check_visible(announced, newest, "/somewhere")


def test_announced_checkpoint_that_stays_invisible_is_an_error() -> None:
    with pytest.raises(NoCheckpoint, match="cannot see the checkpoint of step 5"):
        evaluate._check_visible((5, float("-inf")), (4, 1), "/somewhere")
