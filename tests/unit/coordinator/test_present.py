"""What the API shows of a run."""

from __future__ import annotations

import math

from shoal.coordinator import live_state as present
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs import events as runs_events
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.wire.api import RunSpec
from shoal.wire.member_messages import HeartbeatMsg, StepTimes


def trained_by(count: int) -> CoordinatorState:
    runs = CoordinatorState()
    runs.apply("r", runs_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, count)), {}), 1.0)
    for i in range(count):
        runs.apply("r", ev.MemberConnected(f"m/{i}", "1", Address("h", 1)), 2.0)
    for i in range(count):
        runs.apply("r", ev.MemberReady(f"m/{i}", "x", None), 3.0)
    return runs


def test_the_rate_of_the_world_is_not_counted_once_for_each_member() -> None:
    runs, live = trained_by(2), present.LiveRun()
    live.said = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, share=30, samples_per_s=400.0, loss=0.5),
        "m/1": HeartbeatMsg(1, 8, "compute", 0.0, share=10, samples_per_s=400.0),
    }
    view = present.run_view(runs.runs["r"], runs, live, "d", 4.0)
    assert (view.status, view.samples_per_s, view.step, view.loss) == ("training", 400.0, 8, 0.5)
    assert [(m.member, m.rank, m.samples_per_s) for m in view.members] == [("m/0", 0, 300.0), ("m/1", 1, 100.0)]


def test_members_are_shown_with_where_their_time_goes_and_the_run_with_what_was_decided() -> None:
    runs, live = trained_by(2), present.LiveRun()
    told = {"batch": 64, "noise": 310.0, "idle": (0.38, 0.02)}
    live.said = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, share=51, spent=StepTimes(0.001, 0.05, 0.002, 0.003), **told),
        "m/1": HeartbeatMsg(1, 7, "compute", 0.0, share=13, spent=StepTimes(0.001, 0.052, 0.0, 0.003), **told),
        "m/9": HeartbeatMsg(None, None, "waiting", 0.0, spent=StepTimes(0.1, 0.1, 0.1, 0.1)),
    }
    runs.apply("r", ev.MemberConnected("m/9", "1", Address("h", 1)), 4.0)
    runs.apply("r", ev.AdjustmentReported("m/0", 4, "shares", {"m/0": 40, "m/1": 24}, "a first guess"), 4.0)
    runs.apply("r", ev.AdjustmentReported("m/0", 9, "shares", {"m/0": 51, "m/1": 13}, "m/1 is slow"), 5.0)
    view = present.run_view(runs.runs["r"], runs, live, "d", 6.0)
    assert (view.batch, view.noise, view.idle_before, view.idle_now) == (64, 310.0, 0.38, 0.02)
    assert [(d.what, d.step, d.values, d.reason) for d in view.decided] == [
        ("shares", 9, {"m/0": 51, "m/1": 13}, "m/1 is slow")
    ]
    assert [(m.share, m.data_s, m.compute_s, m.wait_s, m.exchange_s) for m in view.members] == [
        (51, 0.001, 0.05, 0.002, 0.003),
        (13, 0.001, 0.052, 0.0, 0.003),
        (0, 0.0, 0.0, 0.0, 0.0),
    ]


def test_a_figure_that_is_no_number_is_not_shown_and_is_no_news() -> None:
    runs, live = trained_by(1), present.LiveRun()
    live.said = {"m/0": HeartbeatMsg(1, 7, "compute", 0.0, metrics={"nan": math.nan, "inf": math.inf, "fine": 1.0})}
    found = present.measure(runs.runs["r"], live)
    assert found is not None
    assert found.metrics == {"fine": 1.0}
    assert not present.is_news(found, present.measure(runs.runs["r"], live))


def test_figures_of_a_run_outlive_it() -> None:
    runs, live = trained_by(1), present.LiveRun()
    live.measured = runs_events.ProgressMeasured(9, 0, 9, 0.5, 10.0, {}, batch=64, noise=310.0, idle=(None, 0.02))
    view = present.run_view(runs.runs["r"], runs, live, "d", 4.0)
    assert (view.batch, view.noise, view.idle_before, view.idle_now) == (64, 310.0, None, 0.02)


def test_every_member_that_ran_out_of_memory_is_shown() -> None:
    runs = trained_by(2)
    for member in ("m/0", "m/1", "m/0"):
        asked = runs.apply("r", ev.AdjustmentReported(member, 3, "memory", {member: 16}, f"{member} is full"), 4.0)
    assert asked == [], "what is said again is no news, whatever others have said meanwhile"
    view = present.run_view(runs.runs["r"], runs, present.LiveRun(), "d", 5.0)
    assert [d.reason for d in view.decided] == ["m/0 is full", "m/1 is full"]


def test_a_compat_run_is_shown_by_its_processes() -> None:
    runs = CoordinatorState()
    runs.apply("c", runs_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 2), compat="torchrun"), {}), 1.0)
    assert present.run_view(runs.runs["c"], runs, present.LiveRun(), "d", 2.0).status == "starting"
    runs.apply("", fe.AgentConnected("a", None, "h"), 2.0)
    for process in list(runs.fleet.processes.values()):
        runs.apply("c", fe.ProcessStarted("c", process.member, process.incarnation, 1, False), 3.0)
    view = present.run_view(runs.runs["c"], runs, present.LiveRun(), "d", 4.0)
    assert (view.status, view.world_size) == ("training", 2)


def test_those_without_a_seat_are_spares() -> None:
    runs = trained_by(2)
    runs.apply("r", ev.MemberConnected("m/9", "1", Address("h", 1)), 4.0)
    runs.apply("r", ev.MemberReady("m/9", "x", None), 4.0)
    view = present.run_view(runs.runs["r"], runs, present.LiveRun(), "d", 5.0)
    assert [(m.member, m.status) for m in view.members] == [
        ("m/0", "training"),
        ("m/1", "training"),
        ("m/9", "spare"),
    ]


def test_the_last_words_of_members_that_are_done_count() -> None:
    runs, live = trained_by(2), present.LiveRun()
    for i in range(2):
        live.said[f"m/{i}"] = HeartbeatMsg(1, 9, "done", 0.0, loss=0.25, metrics={"accuracy": 0.9})
        runs.apply("r", ev.MemberDone(f"m/{i}", 9), 4.0)
    found = present.measure(runs.runs["r"], live)
    assert runs.runs["r"].membership.finished
    assert found is not None
    assert (found.step, found.loss, found.metrics) == (9, 0.25, {"accuracy": 0.9})


def test_the_loss_is_that_of_the_step_which_is_shown() -> None:
    runs, live = trained_by(3), present.LiveRun()
    live.said = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, loss=0.5),
        "m/1": HeartbeatMsg(1, 19, "compute", 0.0, loss=0.25),
        "m/2": HeartbeatMsg(1, 20, "compute", 0.0),
    }
    found = present.measure(runs.runs["r"], live)
    assert found is not None
    assert (found.step, found.loss) == (20, 0.25)


def test_a_step_is_news_and_so_is_what_the_script_says() -> None:
    last = runs_events.ProgressMeasured(9, 0, 9, 0.5, 10.0, {"accuracy": 0.9})
    assert present.is_news(last, None)
    assert not present.is_news(runs_events.ProgressMeasured(9, 0, 9, 0.5, 11.0, {"accuracy": 0.9}), last)
    assert present.is_news(runs_events.ProgressMeasured(10, 0, 9, 0.5, 10.0, {"accuracy": 0.9}), last)
    assert present.is_news(runs_events.ProgressMeasured(9, 0, 9, 0.5, 10.0, {"accuracy": 0.95}), last)


def test_the_usual_step_is_that_of_the_slowest_to_tell() -> None:
    live = present.LiveRun()
    assert present.step_s(live) == 0.0
    live.said = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, usual_step_s=0.2),
        "m/1": HeartbeatMsg(1, 7, "compute", 0.0, usual_step_s=0.3),
    }
    assert present.step_s(live) == 0.3
