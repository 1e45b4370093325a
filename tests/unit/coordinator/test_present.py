"""What the API shows of a run."""

from __future__ import annotations

from shoal.coordinator import present, records
from shoal.coordinator.runs import Runs
from shoal.core import events as ev
from shoal.core import fleet_events as fe
from shoal.core.world import Address
from shoal.wire.messages import Beat
from shoal.wire.views import RunSpec


def trained_by(count: int) -> Runs:
    runs = Runs()
    runs.apply("r", records.RunCreated(RunSpec("t", ("t.py",), "/", (1, count)), {}), 1.0)
    for i in range(count):
        runs.apply("r", ev.Hello(f"m/{i}", "1", Address("h", 1)), 2.0)
    for i in range(count):
        runs.apply("r", ev.BecameReady(f"m/{i}", "x", None), 3.0)
    return runs


def test_the_rate_of_the_world_is_not_counted_once_for_each_member() -> None:
    runs, live = trained_by(2), present.Live()
    live.said = {
        "m/0": Beat(1, 7, "compute", 0.0, share=30, samples_per_s=400.0, loss=0.5),
        "m/1": Beat(1, 8, "compute", 0.0, share=10, samples_per_s=400.0),
    }
    view = present.run_view(runs.runs["r"], runs, live, "d", 4.0)
    assert (view.status, view.samples_per_s, view.step, view.loss) == ("training", 400.0, 8, 0.5)
    assert [(m.member, m.rank, m.samples_per_s) for m in view.members] == [("m/0", 0, 300.0), ("m/1", 1, 100.0)]


def test_a_compat_run_is_shown_by_its_processes() -> None:
    runs = Runs()
    runs.apply("c", records.RunCreated(RunSpec("t", ("t.py",), "/", (1, 2), compat="torchrun"), {}), 1.0)
    assert present.run_view(runs.runs["c"], runs, present.Live(), "d", 2.0).status == "starting"
    runs.apply("", fe.AgentJoined("a", None, "h"), 2.0)
    for process in list(runs.fleet.processes.values()):
        runs.apply("c", fe.ProcessStarted("c", process.member, process.incarnation, 1, False), 3.0)
    view = present.run_view(runs.runs["c"], runs, present.Live(), "d", 4.0)
    assert (view.status, view.world_size) == ("training", 2)


def test_those_without_a_seat_are_spares() -> None:
    runs = trained_by(2)
    runs.apply("r", ev.Hello("m/9", "1", Address("h", 1)), 4.0)
    runs.apply("r", ev.BecameReady("m/9", "x", None), 4.0)
    view = present.run_view(runs.runs["r"], runs, present.Live(), "d", 5.0)
    assert [(m.member, m.status) for m in view.members] == [
        ("m/0", "training"),
        ("m/1", "training"),
        ("m/9", "spare"),
    ]
