"""An evaluator's failures affect no trainer, and the best evaluation is found whatever came in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs import evaluation as el
from shoal.core.world import Address

ME = "lab/evaluator-0"
CAUSES = ("user", "infrastructure", "preempted", "refused", "asked", "done")


def of_kind(instruction: fe.Instruction) -> str:
    return getattr(instruction, "member", "")


@given(st.lists(st.tuples(st.sampled_from(CAUSES), st.floats(0.0, 2000.0)), max_size=20), st.booleans())
def test_evaluator_can_die_in_any_way_without_an_effect_on_trainers(
    deaths: list[tuple[str, float]], silent: bool
) -> None:
    state, now = fl.FleetState(salt="s"), 1000.0
    for event in (fe.AgentConnected("lab", None, "h"), fe.RunRequested("r", 1, 2, evaluators=1)):
        state, _ = fl.decide(state, event, now)
    trainers = {key: p for key, p in state.processes.items() if p.role == "trainer"}
    assert len(trainers) == 2
    for cause, wait_s in deaths:
        p = state.processes["r", ME]
        happened: list[fe.Event] = [fe.ProcessExited("r", ME, p.incarnation, cause, "why")]
        happened = [fe.MemberUnresponsive("r", ME), *happened] if silent else happened
        now += wait_s
        for event in (*happened, *fl.due(state, now)):
            state, instructions = fl.decide(state, event, now)
            assert {of_kind(instruction) for instruction in instructions} <= {ME}
    assert {key: p for key, p in state.processes.items() if p.role == "trainer"} == trainers
    assert state.runs["r"].status == fl.ACTIVE
    state, instructions = fl.decide(state, fe.RunFinished("r"), now)
    for p in trainers.values():
        state, instructions = fl.decide(state, fe.ProcessExited("r", p.member, p.incarnation, "done"), now)
    if not state.processes.get(("r", ME)):
        assert instructions == (fe.MarkRunEnded("r", "all members are done", 0),)


NUMBERS = st.one_of(st.none(), st.floats(-1e6, 1e6))
OTHERS = st.sampled_from(
    (
        ev.MemberConnected(ME, "2", Address("h", 0), None, None, False, False, "evaluator"),
        ev.MemberDisconnected(ME),
        ev.MemberLost(ME, "silent"),
        ev.MemberLeft(ME, 3),
        ev.CoordinatorRestarted(),
    )
)


@given(st.lists(st.one_of(NUMBERS, OTHERS), max_size=30), st.booleans(), st.integers(1, 5))
def test_best_is_the_first_of_equals_and_early_stopping_counts_from_it(
    happened: list[float | object | None], largest: bool, limit: int
) -> None:
    state, values, stopped = el.EvaluationState(), list[float | None](), False
    best = "max:score" if largest else "min:score"
    for score in happened:
        event = score
        if score is None or isinstance(score, float):
            values.append(score)
            event = el.EvaluationReported(ME, 10 * len(values), {} if score is None else {"score": score}, best, limit)
        state, instructions = el.decide(state, event, 0.0)
        stopped = stopped or any(isinstance(i, el.StopEarly) for i in instructions)
    numbers = [value for value in values if value is not None]
    status = state.status
    assert status.evaluations == len(values)
    expected = (max if largest else min)(numbers) if numbers else None
    assert status.best_value == expected
    if expected is not None:
        assert status.best_step == 10 * (values.index(expected) + 1)
        assert status.without == len(values) - 1 - values.index(expected)
    assert stopped or status.without < limit
