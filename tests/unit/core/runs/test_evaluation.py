"""Evaluation: the best checkpoint and early stopping."""

from __future__ import annotations

import pytest

from shoal.core.membership import events as ev
from shoal.core.membership.state import LastHeartbeat
from shoal.core.runs import evaluation as el
from shoal.core.world import Address
from shoal.errors import BadEvaluation

ME = "lab/evaluator-0"
HELLO = ev.MemberConnected(ME, "1", Address("h", 0), None, None, False, False, "evaluator")


class Story:
    """A state, and all that followed from what happened to it."""

    def __init__(self) -> None:
        self.state = el.EvaluationState()
        self.instructions: list[el.Instruction] = []

    def on(self, *happened: object, now: float = 1000.0) -> Story:
        self.instructions = []
        for event in happened:
            self.state, asked = el.decide(self.state, event, now)
            self.instructions += asked
        return self

    def scores(self, *values: float, best: str = "max:score", patience: int | None = None, export: str = "") -> Story:
        first = (self.state.status.step or 0) + 10
        found = [
            el.EvaluationReported(ME, first + 10 * i, {"score": value}, best, patience, export)
            for i, value in enumerate(values)
        ]
        return self.on(*found)

    @property
    def stops(self) -> list[str]:
        return [one.reason for one in self.instructions if isinstance(one, el.StopEarly)]


def test_max_goal_keeps_the_largest_value() -> None:
    status = Story().scores(1.0, 3.0, 2.0).state.status
    assert (status.best_step, status.best_value, status.without) == (20, 3.0, 1)
    assert (status.step, status.metrics, status.evaluations) == (30, {"score": 2.0}, 3)


def test_min_goal_keeps_the_smallest_value() -> None:
    assert Story().scores(3.0, 1.0, 2.0, best="min:score").state.status.best_step == 20


def test_equal_value_is_not_better() -> None:
    assert Story().scores(1.0, 1.0).state.status.without == 1


def test_missing_metric_is_not_better() -> None:
    lacking = el.EvaluationReported(ME, 30, {}, "max:score", 5)
    status = Story().scores(1.0).on(lacking).state.status
    assert (status.best_value, status.without) == (1.0, 1)


def test_run_stops_early_with_a_reason() -> None:
    story = Story().scores(2.0, 1.0, patience=2)
    assert story.stops == []
    assert story.scores(1.5, patience=2).stops == ["stopped early: 2 evaluations did not improve on score 2 of step 10"]


def test_better_value_resets_the_count() -> None:
    assert Story().scores(1.0, 0.5, 2.0, 1.0, patience=2).stops == []


def test_run_without_a_goal_has_no_best_and_never_stops_early() -> None:
    story = Story().scores(1.0, 2.0, 3.0, best="")
    assert story.state.status.best_value is None
    assert story.stops == []


def test_best_starts_over_with_another_goal() -> None:
    status = Story().scores(5.0, 6.0).scores(7.0, best="min:score").state.status
    assert (status.best, status.best_value, status.best_step) == ("min:score", 7.0, 30)


def test_repeated_report_counts_once_and_is_acknowledged_twice() -> None:
    said = el.EvaluationReported(ME, 10, {"score": 1.0}, "max:score", 3)
    story = Story().on(said, said)
    assert story.state.status.evaluations == 1
    assert sum(isinstance(one, el.SendEvaluationStatus) for one in story.instructions) == 2
    assert sum(isinstance(one, el.EvaluationNote) for one in story.instructions) == 1


def test_connecting_evaluator_receives_the_status() -> None:
    story = Story().scores(1.0).on(HELLO)
    assert story.instructions == [el.SendEvaluationStatus((ME,), story.state.status)]
    assert story.state.status.best_value == 1.0


def test_story_has_the_metrics_and_the_best() -> None:
    story = Story().scores(2.0, export="best.pt").on(el.EvaluationReported(ME, 20, {"score": 1.0}, "max:score"))
    line = next(one for one in story.instructions if isinstance(one, el.EvaluationNote))
    assert line.text == f"{ME} evaluated step 20: score 1"
    assert line.reason == "best is 2 at step 10"
    assert story.state.status.export == "best.pt"


def test_silent_evaluator_is_lost_later_than_a_member() -> None:
    state = Story().on(HELLO, now=1000.0).state
    assert el.due(state, {}, 1000.0 + el.LEASE_S) == ()
    assert el.due(state, {ME: LastHeartbeat(1020.0)}, 1001.0 + el.LEASE_S) == ()
    assert [lost.member for lost in el.due(state, {}, 1001.0 + el.LEASE_S)] == [ME]


def test_downtime_of_the_coordinator_does_not_count_as_silence() -> None:
    state = Story().on(HELLO, now=1000.0).on(ev.CoordinatorRestarted(), now=5000.0).state
    assert el.due(state, {}, 5001.0) == ()


def test_status_outlives_the_evaluator() -> None:
    story = Story().on(HELLO).scores(1.0).on(ev.MemberDisconnected(ME))
    assert not story.state.members[ME].connected
    story.on(ev.MemberLost(ME, "silent"))
    assert story.state.members == {}
    assert story.state.status.best_value == 1.0


@pytest.mark.parametrize("text", ["accuracy", "max:", "most:accuracy", "max"])
def test_invalid_goal_is_refused(text: str) -> None:
    with pytest.raises(BadEvaluation, match=text):
        el.parse(text)


@pytest.mark.parametrize("best", ["max:loss", "min:loss"])
def test_nan_is_not_better_than_nothing(best: str) -> None:
    goal = el.parse(best)
    assert goal is not None
    assert not goal.is_better(float("nan"), None)
    assert goal.is_better(0.0, None)
