from __future__ import annotations

import math

import pytest

from shoal.coordinator.storage.state_snapshot import StoredState, decode, encode
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs.decide import apply
from shoal.core.runs.events import MachineReported, ProgressMeasured, RunCreated
from shoal.core.runs.spec import MachineInfo, RunSpec
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.errors import JournalDamaged


def trained() -> CoordinatorState:
    state = CoordinatorState()
    settings = {"lease_s": 3.0, "servers": 0, "exchange": "ring", "tensorboard": False}
    for run, event in (
        ("", fe.CoordinatorStarted("s")),
        ("", MachineReported("lab", MachineInfo("m", 2, 1 << 40, ("cpu",)), 7)),
        ("r", RunCreated(RunSpec("t", ("t.py",), "/", (1, 2)), settings)),
        ("", fe.AgentConnected("lab", 3, "h")),
        ("r", ev.MemberConnected("lab/0", "s-1", Address("h", 1, ("g",)))),
        ("r", ev.MemberReady("lab/0", "model", None)),
        ("r", ev.MemberConnected("lab/1", "s-2", Address("h", 2))),
        ("r", ev.MemberReady("lab/1", "model", None)),
        ("r", ev.AdjustmentReported("lab/0", 3, "shares", {"lab/0": 40, "lab/1": 24}, "lab/1 is slow")),
        ("r", ev.ClaimRequested("lab/0", "model.pt")),
        ("r", fe.ProcessExited("r", "lab/1", "s-2", "user", "exit 1")),
    ):
        apply(state, run, event, 5.0)
    return state


def test_state_comes_back_as_it_was_and_goes_on_alike() -> None:
    state = trained()
    progress = {"r": ProgressMeasured(3, 0, None, math.inf, 10.0, {"a": 1.0}, idle=(None, 0.1))}
    again = decode(encode(StoredState(state, progress)))
    assert (again.state, again.progress) == (state, progress)
    assert again.state.fleet.processes.of_run("r") == state.fleet.processes.of_run("r")
    assert again.state.fleet.processes.slots_used("lab") == state.fleet.processes.slots_used("lab")
    for event in (ev.WorldBroken("lab/0", 1, 4, ("lab/1",), "reset"), ev.ScaleRequested(1, 1)):
        assert apply(again.state, "r", event, 6.0) == apply(state, "r", event, 6.0)
    assert again.state == state


def test_no_bytes_are_an_empty_state() -> None:
    assert decode(b"") == StoredState()


@pytest.mark.parametrize("damage", [b"x", b"\x82", encode(StoredState(trained()))[:-7]])
def test_damaged_bytes_are_refused(damage: bytes) -> None:
    with pytest.raises(JournalDamaged, match="snapshot"):
        decode(damage)
