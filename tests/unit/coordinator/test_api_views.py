"""API views of runs, and the progress that live state measures."""

from __future__ import annotations

import math

from shoal.coordinator import api_views
from shoal.coordinator.live_state import LiveRun, has_progressed, measure_progress, usual_step_s
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.membership.state import LastHeartbeat
from shoal.core.runs import events as run_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.wire.api import RunSpec
from shoal.wire.member_messages import HeartbeatMsg, StepTimes


def trained_by(count: int) -> CoordinatorState:
    state = CoordinatorState()
    apply(state, "r", run_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, count)), {}), 1.0)
    for i in range(count):
        apply(state, "r", ev.MemberConnected(f"m/{i}", "1", Address("h", 1)), 2.0)
    for i in range(count):
        apply(state, "r", ev.MemberReady(f"m/{i}", "x", None), 3.0)
    return state


def test_rate_of_the_world_is_counted_once() -> None:
    state, live = trained_by(2), LiveRun()
    live.heartbeats = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, share=30, samples_per_s=400.0, loss=0.5),
        "m/1": HeartbeatMsg(1, 8, "compute", 0.0, share=10, samples_per_s=400.0),
    }
    view = api_views.run_view(state.runs["r"], state, live, "d", 4.0)
    assert (view.status, view.samples_per_s, view.step, view.loss) == ("training", 400.0, 8, 0.5)
    assert [(m.member, m.rank, m.samples_per_s) for m in view.members] == [("m/0", 0, 300.0), ("m/1", 1, 100.0)]


def test_view_shows_step_times_of_members_and_adjustments_of_the_run() -> None:
    state, live = trained_by(2), LiveRun()
    told = {"batch": 64, "noise": 310.0, "idle": (0.38, 0.02)}
    live.heartbeats = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, share=51, spent=StepTimes(0.001, 0.05, 0.002, 0.003), **told),
        "m/1": HeartbeatMsg(1, 7, "compute", 0.0, share=13, spent=StepTimes(0.001, 0.052, 0.0, 0.003), **told),
        "m/9": HeartbeatMsg(None, None, "waiting", 0.0, spent=StepTimes(0.1, 0.1, 0.1, 0.1)),
    }
    apply(state, "r", ev.MemberConnected("m/9", "1", Address("h", 1)), 4.0)
    apply(state, "r", ev.AdjustmentReported("m/0", 4, "shares", {"m/0": 40, "m/1": 24}, "a first guess"), 4.0)
    apply(state, "r", ev.AdjustmentReported("m/0", 9, "shares", {"m/0": 51, "m/1": 13}, "m/1 is slow"), 5.0)
    view = api_views.run_view(state.runs["r"], state, live, "d", 6.0)
    assert (view.batch, view.noise, view.idle_before, view.idle_now) == (64, 310.0, 0.38, 0.02)
    assert [(d.what, d.step, d.values, d.reason) for d in view.decided] == [
        ("shares", 9, {"m/0": 51, "m/1": 13}, "m/1 is slow")
    ]
    assert [(m.share, m.data_s, m.compute_s, m.wait_s, m.exchange_s) for m in view.members] == [
        (51, 0.001, 0.05, 0.002, 0.003),
        (13, 0.001, 0.052, 0.0, 0.003),
        (0, 0.0, 0.0, 0.0, 0.0),
    ]


def test_metric_that_is_not_finite_is_left_out() -> None:
    state, live = trained_by(1), LiveRun()
    live.heartbeats = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, metrics={"nan": math.nan, "inf": math.inf, "fine": 1.0})
    }
    progress = measure_progress(state.runs["r"], live)
    assert progress is not None
    assert progress.metrics == {"fine": 1.0}
    assert not has_progressed(progress, measure_progress(state.runs["r"], live))


def test_last_progress_is_shown_after_the_end() -> None:
    state, live = trained_by(1), LiveRun()
    live.progress = run_events.ProgressMeasured(9, 0, 9, 0.5, 10.0, {}, batch=64, noise=310.0, idle=(None, 0.02))
    view = api_views.run_view(state.runs["r"], state, live, "d", 4.0)
    assert (view.batch, view.noise, view.idle_before, view.idle_now) == (64, 310.0, None, 0.02)


def test_view_shows_every_member_that_ran_out_of_memory() -> None:
    state = trained_by(2)
    for member in ("m/0", "m/1", "m/0"):
        asked = apply(state, "r", ev.AdjustmentReported(member, 3, "memory", {member: 16}, f"{member} is full"), 4.0)
    assert asked == [], "what is said again is no news, whatever others have said meanwhile"
    view = api_views.run_view(state.runs["r"], state, LiveRun(), "d", 5.0)
    assert [d.reason for d in view.decided] == ["m/0 is full", "m/1 is full"]


def test_compat_run_is_shown_by_its_processes() -> None:
    state = CoordinatorState()
    apply(state, "c", run_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 2), compat="torchrun"), {}), 1.0)
    assert api_views.run_view(state.runs["c"], state, LiveRun(), "d", 2.0).status == "starting"
    apply(state, "", fe.AgentConnected("a", None, "h"), 2.0)
    for process in list(state.fleet.processes.values()):
        apply(state, "c", fe.ProcessStarted("c", process.member, process.incarnation, 1, False), 3.0)
    view = api_views.run_view(state.runs["c"], state, LiveRun(), "d", 4.0)
    assert (view.status, view.world_size) == ("training", 2)
    assert view.forecast is not None
    assert "reports no steps" in view.forecast.unknown


def test_members_without_a_seat_are_spares() -> None:
    state = trained_by(2)
    apply(state, "r", ev.MemberConnected("m/9", "1", Address("h", 1)), 4.0)
    apply(state, "r", ev.MemberReady("m/9", "x", None), 4.0)
    view = api_views.run_view(state.runs["r"], state, LiveRun(), "d", 5.0)
    assert [(m.member, m.status) for m in view.members] == [
        ("m/0", "training"),
        ("m/1", "training"),
        ("m/9", "spare"),
    ]


def test_silent_member_is_shown_as_evicted_until_it_answers() -> None:
    state, live = CoordinatorState(), LiveRun()
    apply(state, "r", run_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 2)), {}), 1.0)
    apply(state, "", fe.AgentConnected("local", 2, "h"), 1.0)
    for process in list(state.fleet.processes.values()):
        apply(state, "r", fe.ProcessStarted("r", process.member, process.incarnation, 7, False), 1.0)
        apply(state, "r", ev.MemberConnected(process.member, process.incarnation, Address("h", 1)), 2.0)
    for process in list(state.fleet.processes.values()):
        apply(state, "r", ev.MemberReady(process.member, "x", None), 3.0)
    live.heartbeats["local/1"], live.leases["local/1"] = HeartbeatMsg(1, 3, "compute", 0.0), LastHeartbeat(4.0)
    apply(state, "r", ev.MemberLost("local/1", "lease expired after 3.0 s of silence"), 7.0)
    (view,) = [m for m in api_views.run_view(state.runs["r"], state, live, "d", 9.0).members if m.member == "local/1"]
    assert (view.status, view.phase, view.phase_age_s) == ("evicted", "silent", 5.0)


def test_last_heartbeats_of_finished_members_count() -> None:
    state, live = trained_by(2), LiveRun()
    for i in range(2):
        live.heartbeats[f"m/{i}"] = HeartbeatMsg(1, 9, "done", 0.0, loss=0.25, metrics={"accuracy": 0.9})
        apply(state, "r", ev.MemberDone(f"m/{i}", 9), 4.0)
    progress = measure_progress(state.runs["r"], live)
    assert state.runs["r"].membership.finished
    assert progress is not None
    assert (progress.step, progress.loss, progress.metrics) == (9, 0.25, {"accuracy": 0.9})


def test_loss_is_that_of_the_latest_step() -> None:
    state, live = trained_by(3), LiveRun()
    live.heartbeats = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, loss=0.5),
        "m/1": HeartbeatMsg(1, 19, "compute", 0.0, loss=0.25),
        "m/2": HeartbeatMsg(1, 20, "compute", 0.0),
    }
    progress = measure_progress(state.runs["r"], live)
    assert progress is not None
    assert (progress.step, progress.loss) == (20, 0.25)


def test_progress_is_a_new_step_or_other_metrics() -> None:
    last = run_events.ProgressMeasured(9, 0, 9, 0.5, 10.0, {"accuracy": 0.9})
    assert has_progressed(last, None)
    assert not has_progressed(run_events.ProgressMeasured(9, 0, 9, 0.5, 11.0, {"accuracy": 0.9}), last)
    assert has_progressed(run_events.ProgressMeasured(10, 0, 9, 0.5, 10.0, {"accuracy": 0.9}), last)
    assert has_progressed(run_events.ProgressMeasured(9, 0, 9, 0.5, 10.0, {"accuracy": 0.95}), last)


def test_usual_step_is_that_of_the_slowest_member() -> None:
    live = LiveRun()
    assert usual_step_s(live) == 0.0
    live.heartbeats = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, usual_step_s=0.2),
        "m/1": HeartbeatMsg(1, 7, "compute", 0.0, usual_step_s=0.3),
    }
    assert usual_step_s(live) == 0.3


def test_time_left_is_foretold_while_the_run_trains() -> None:
    state, live = trained_by(2), LiveRun()
    run = state.runs["r"]
    for second in range(20):
        live.forecast.observe(float(second), 10 * second, 1000, run.membership.world.number, 2)
    shown = api_views.run_view(run, state, live, "", 19.0).forecast
    assert shown is not None
    assert (shown.seconds, shown.source) == (81.0, "190 steps of this run")
    assert shown.low_s < 81.0 < shown.high_s
    apply(state, "r", run_events.UserStopRequested("stop", True, 30.0), 20.0)
    shown = api_views.run_view(run, state, live, "", 21.0).forecast
    assert shown is not None
    assert shown.unknown == "the run is stopping"
