"""The follower's reaction to signals, and what it remembers of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
from tests.unit.views import run_view, story_line

from shoal.cli import follower as follower_module
from shoal.cli.follower import Follower
from shoal.cli.output.lines import PlainOutput
from shoal.cli.signals import SignalCounter
from shoal.errors import CoordinatorUnreachable
from shoal.wire.api import LogPage, RunView, StopRequest, StoryLine


class FakeClient:
    """A coordinator that answers each poll with the next view and the next lines of the story."""

    url = "http://coordinator"

    def __init__(self, *polls: tuple[RunView | None, list[StoryLine]]) -> None:
        self._polls: Iterator[tuple[RunView | None, list[StoryLine]]] = iter(polls)
        self._lines: list[StoryLine] = []
        self.stops: list[StopRequest] = []

    def run(self, run: str) -> RunView:
        view, self._lines = next(self._polls, (run_view(run, status="stopped"), []))
        if view is None:
            raise CoordinatorUnreachable("down")
        return view

    def story(self, run: str, after: int, limit: int) -> tuple[StoryLine, ...]:
        lines, self._lines = self._lines, []
        return tuple(lines)

    def logs(self, run: str, after: int, limit: int) -> LogPage:
        return LogPage((), 0)

    def stop(self, run: str, request: StopRequest) -> None:
        self.stops.append(request)


class FakeSignals:
    """Counts one signal more at each of the first sleeps."""

    name = "Ctrl-C"

    def __init__(self, signals: int = 0) -> None:
        self.count, self._signals = 0, signals

    def sleep(self, seconds: float) -> None:
        del seconds
        self.count = min(self.count + 1, self._signals)


def follow(client: FakeClient, signals: int = 0) -> tuple[Any, list[str]]:
    output: list[str] = []
    follower = Follower(cast(Any, client), run_view(step=0), PlainOutput(output.append), list)
    return follower.follow(cast(SignalCounter, FakeSignals(signals)), 0.0), output


def test_first_signal_asks_for_a_checkpoint_and_the_second_does_not() -> None:
    client = FakeClient(*[(run_view(), []) for _ in range(4)])
    result, output = follow(client, signals=2)
    assert [request.checkpoint for request in client.stops] == [True, False]
    assert not result.abandoned
    assert "shoal: stopping after a checkpoint; Ctrl-C again stops without one" in output


def test_third_signal_abandons_the_run() -> None:
    client = FakeClient(*[(run_view(), []) for _ in range(10)])
    assert follow(client, signals=3)[0].abandoned


def test_signal_waits_for_a_coordinator_that_does_not_answer() -> None:
    client = FakeClient((None, []), (None, []), (run_view(), []))
    _, output = follow(client, signals=1)
    assert len(client.stops) == 1
    assert output.count("shoal: the coordinator does not answer; members continue without it") == 1
    assert "shoal: the coordinator is back" in output


def frozen(released: threading.Event) -> FakeClient:
    """Return a coordinator that answers only once it is released."""
    client = FakeClient()
    answer = client.run

    def run(run: str) -> RunView:
        released.wait(60.0)
        return answer(run)

    client.run = run  # type: ignore[method-assign]
    return client


def follow_frozen(monkeypatch: pytest.MonkeyPatch, signals: int) -> tuple[Any, list[str]]:
    monkeypatch.setattr(follower_module, "UNHEARD_NOTE_S", 0.0)
    monkeypatch.setattr(follower_module, "UNHEARD_LIMIT_S", 0.3)
    output: list[str] = []
    released = threading.Event()
    follower = Follower(cast(Any, frozen(released)), run_view(step=0), PlainOutput(output.append), list)
    counter = FakeSignals()
    counter.count = signals
    try:
        return follower.follow(cast(SignalCounter, counter), 0.0), output
    finally:
        released.set()


def test_signal_to_a_frozen_coordinator_is_answered_and_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    result, output = follow_frozen(monkeypatch, signals=1)
    assert result.abandoned
    assert "does not answer, so Ctrl-C cannot stop the run after a checkpoint; waiting 0.3 s" in output[0]
    assert output.count("shoal: giving the coordinator up; the newest checkpoint stays") == 1


def test_second_signal_gives_a_frozen_coordinator_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    result, _ = follow_frozen(monkeypatch, signals=2)
    assert result.abandoned
    assert time.monotonic() - began < 30.0


def test_coordinator_that_freezes_during_the_stop_request_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "UNHEARD_LIMIT_S", 0.2)
    client, released = FakeClient(*[(run_view(), [])] * 100), threading.Event()
    client.stop = lambda run, request: released.wait(60.0)  # type: ignore[method-assign, assignment]
    counter = FakeSignals(1)
    counter.count = 1
    follower = Follower(cast(Any, client), run_view(step=0), PlainOutput([].append), list)
    assert follower.follow(cast(SignalCounter, counter), 0.0).abandoned
    released.set()


def test_step_reached_before_a_new_world_is_remembered() -> None:
    formed = story_line(1, "FormWorld", world=2, step=40)
    client = FakeClient((run_view(step=120), []), (run_view(step=41), [formed]))
    assert follow(client)[0].reached == {2: 120}


@pytest.mark.parametrize("since", [0.0, 150.0])
def test_story_before_a_resume_is_not_shown(since: float) -> None:
    lines = [story_line(1, "MembershipNote", "old", at=100.0), story_line(2, "MembershipNote", "new", at=200.0)]
    client = FakeClient((run_view(), lines))
    output: list[str] = []
    follower = Follower(cast(Any, client), run_view(), PlainOutput(output.append), list, since)
    follower.follow(cast(SignalCounter, FakeSignals()), 0.0)
    assert ("shoal: old" in output) == (since == 0.0)
    assert "shoal: new" in output
