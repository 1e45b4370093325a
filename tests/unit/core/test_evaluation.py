"""How the evaluation of a run stands, without any evaluator."""

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
        self.asked: list[el.Instruction] = []

    def on(self, *happened: object, now: float = 1000.0) -> Story:
        self.asked = []
        for event in happened:
            self.state, asked = el.decide(self.state, event, now)
            self.asked += asked
        return self

    def scores(self, *values: float, best: str = "max:score", patience: int | None = None, export: str = "") -> Story:
        first = (self.state.standing.step or 0) + 10
        found = [
            el.EvaluationReported(ME, first + 10 * i, {"score": value}, best, patience, export)
            for i, value in enumerate(values)
        ]
        return self.on(*found)

    @property
    def stops(self) -> list[str]:
        return [one.reason for one in self.asked if isinstance(one, el.StopEarly)]


def test_the_largest_is_best_if_that_was_asked() -> None:
    standing = Story().scores(1.0, 3.0, 2.0).state.standing
    assert (standing.best_step, standing.best_value, standing.without) == (20, 3.0, 1)
    assert (standing.step, standing.metrics, standing.evaluations) == (30, {"score": 2.0}, 3)


def test_the_smallest_is_best_if_that_was_asked() -> None:
    assert Story().scores(3.0, 1.0, 2.0, best="min:score").state.standing.best_step == 20


def test_what_is_equal_is_no_better() -> None:
    assert Story().scores(1.0, 1.0).state.standing.without == 1


def test_a_metric_that_was_no_number_is_no_better() -> None:
    lacking = el.EvaluationReported(ME, 30, {}, "max:score", 5)
    standing = Story().scores(1.0).on(lacking).state.standing
    assert (standing.best_value, standing.without) == (1.0, 1)


def test_patience_ends_a_run_with_a_reason() -> None:
    story = Story().scores(2.0, 1.0, patience=2)
    assert story.stops == []
    assert story.scores(1.5, patience=2).stops == ["stopped early: 2 evaluations did not improve on score 2 of step 10"]


def test_a_better_one_restores_all_patience() -> None:
    assert Story().scores(1.0, 0.5, 2.0, 1.0, patience=2).stops == []


def test_without_a_goal_nothing_is_best_and_nothing_ends() -> None:
    story = Story().scores(1.0, 2.0, 3.0, best="")
    assert story.state.standing.best_value is None
    assert story.stops == []


def test_another_goal_begins_anew() -> None:
    standing = Story().scores(5.0, 6.0).scores(7.0, best="min:score").state.standing
    assert (standing.best, standing.best_value, standing.best_step) == ("min:score", 7.0, 30)


def test_what_is_said_twice_counts_once_and_is_answered_twice() -> None:
    said = el.EvaluationReported(ME, 10, {"score": 1.0}, "max:score", 3)
    story = Story().on(said, said)
    assert story.state.standing.evaluations == 1
    assert sum(isinstance(one, el.SendEvaluationStatus) for one in story.asked) == 2
    assert sum(isinstance(one, el.EvaluationNote) for one in story.asked) == 1


def test_whoever_connects_is_told_how_things_stand() -> None:
    story = Story().scores(1.0).on(HELLO)
    assert story.asked == [el.SendEvaluationStatus((ME,), story.state.standing)]
    assert story.state.standing.best_value == 1.0


def test_the_story_says_what_was_found_and_what_it_means() -> None:
    story = Story().scores(2.0, export="best.pt").on(el.EvaluationReported(ME, 20, {"score": 1.0}, "max:score"))
    line = next(one for one in story.asked if isinstance(one, el.EvaluationNote))
    assert line.text == f"{ME} evaluated step 20: score 1"
    assert line.reason == "the best is 2 at step 10"
    assert story.state.standing.export == "best.pt"


def test_a_silent_evaluator_is_given_up_later_than_a_member() -> None:
    state = Story().on(HELLO, now=1000.0).state
    assert el.due(state, {}, 1000.0 + el.LEASE_S) == ()
    assert el.due(state, {ME: LastHeartbeat(1020.0)}, 1001.0 + el.LEASE_S) == ()
    assert [lost.member for lost in el.due(state, {}, 1001.0 + el.LEASE_S)] == [ME]


def test_silence_while_the_coordinator_was_away_is_no_silence() -> None:
    state = Story().on(HELLO, now=1000.0).on(ev.CoordinatorRestarted(), now=5000.0).state
    assert el.due(state, {}, 5001.0) == ()


def test_whoever_is_gone_is_forgotten_and_what_it_found_is_not() -> None:
    story = Story().on(HELLO).scores(1.0).on(ev.MemberDisconnected(ME))
    assert not story.state.members[ME].connected
    story.on(ev.MemberLost(ME, "silent"))
    assert story.state.members == {}
    assert story.state.standing.best_value == 1.0


@pytest.mark.parametrize("text", ["accuracy", "max:", "most:accuracy", "max"])
def test_a_goal_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadEvaluation, match=text):
        el.parse(text)


@pytest.mark.parametrize("best", ["max:loss", "min:loss"])
def test_what_is_no_number_is_not_better_than_nothing(best: str) -> None:
    goal = el.parse(best)
    assert goal is not None
    assert not goal.better(float("nan"), None)
    assert goal.better(0.0, None)
