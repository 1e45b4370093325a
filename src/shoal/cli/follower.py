"""The follower: polls a run until it has ended, shows what is new, and turns signals into stop requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.cli.output.lines import Display
from shoal.cli.output.tracebacks import TracebackLog
from shoal.cli.signals import SignalCounter
from shoal.errors import CoordinatorUnreachable
from shoal.launch.api_client import ApiClient
from shoal.launch.run_lookup import ENDED
from shoal.wire.api import RunView, StopRequest, StoryLine

PAGE = 1000
STORY_KEPT = 5000
SILENCE_LIMIT_S = 600.0
STOP_NOW_TIMEOUT_S = 5.0
DRAIN_S = 0.5


@dataclass
class FollowResult:
    """The last view of a run and its story; `abandoned` if the user stopped waiting for the run to end.

    `reached` is the step that the run had reached when each world formed, by the number of the world.
    """

    view: RunView
    story: list[StoryLine] = field(default_factory=list)
    abandoned: bool = False
    reached: dict[int, int] = field(default_factory=dict)
    tracebacks: TracebackLog = field(default_factory=TracebackLog)


class Follower:
    """Follows one run of one coordinator on one display.

    `restart_services` is called at every poll and returns what it had to restart. Story and logs before `since` are not
    shown: they belong to the time before the run was resumed. With `collapse`, a traceback that members repeat is shown
    once.
    """

    def __init__(
        self,
        client: ApiClient,
        view: RunView,
        display: Display,
        restart_services: Callable[[], list[str]],
        since: float = 0.0,
        *,
        collapse: bool = True,
    ) -> None:
        self._client = client
        self._display = display
        self._restart_services = restart_services
        self._since = since
        self._after_story = 0
        self._after_logs = client.logs(view.run, after=-1, limit=1).next if since else 0
        self._silent_since: float | None = None
        self.result = FollowResult(view, tracebacks=TracebackLog(collapse))

    def follow(self, signals: SignalCounter, interval_s: float) -> FollowResult:
        """Block until the run has ended or the user has abandoned it with repeated signals."""
        handled, stop_deadline = 0, 0.0
        while True:
            for note in self._restart_services():
                self._display.note(note)
            reached = self._poll()
            if self.result.view.status in ENDED:
                self._drain(signals)
                if held_back := self.result.tracebacks.flush():
                    self._display.logs(held_back)
                return self.result
            if reached and signals.count > handled:
                handled = min(signals.count, 2)
                self._stop(now=handled >= 2, by=signals.name)
                stop_deadline = time.monotonic() + STOP_NOW_TIMEOUT_S
            if signals.count > 2 or (handled >= 2 and time.monotonic() > stop_deadline):
                self.result.abandoned = True
                return self.result
            signals.sleep(0.1 if handled else interval_s)

    def _poll(self) -> bool:
        """Fetch and show what is new; return whether the coordinator answered."""
        try:
            view = self._client.run(self.result.view.run)
            self._show_new_lines()
        except CoordinatorUnreachable:
            self._note_silence()
            return False
        if self._silent_since is not None:
            self._display.note("the coordinator is back")
            self._silent_since = None
        self.result.view = view
        self._display.view(view)
        return True

    def _show_new_lines(self) -> None:
        run = self.result.view.run
        lines = self._client.story(run, after=self._after_story, limit=PAGE)
        if lines:
            self._after_story = lines[-1].seq
            new_lines = [line for line in lines if line.at >= self._since]
            self.result.story = [*self.result.story, *new_lines][-STORY_KEPT:]
            # The view of the previous poll is older than these lines: a world that begins before its step lost some.
            formed = [line.world for line in new_lines if line.kind == "FormWorld" and line.world is not None]
            self.result.reached |= dict.fromkeys(formed, self.result.view.step)
            self._display.story(new_lines)
        page = self._client.logs(run, after=self._after_logs, limit=PAGE)
        if shown := self.result.tracebacks.add(page.lines):
            self._display.logs(shown)
        self._after_logs = page.next

    def _note_silence(self) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self._display.note("the coordinator does not answer; members continue without it")
        if now - self._silent_since > SILENCE_LIMIT_S:
            raise CoordinatorUnreachable(
                f"the coordinator has not answered for {SILENCE_LIMIT_S:g} s", where=self._client.url, do="shoal ps"
            )

    def _stop(self, *, now: bool, by: str) -> None:
        if now:
            self._display.note("stopping now, without a checkpoint")
            self._client.stop(self.result.view.run, StopRequest(f"second {by}", checkpoint=False, grace_s=1.0))
            return
        self._display.note(f"stopping after a checkpoint; {by} again stops without one")
        self._client.stop(self.result.view.run, StopRequest(by))

    def _drain(self, signals: SignalCounter) -> None:
        """Show the lines that arrive shortly after the end: exits are reported after the run's last state."""
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            before = (self._after_story, self._after_logs)
            try:
                self._show_new_lines()
            except CoordinatorUnreachable:
                return
            if before == (self._after_story, self._after_logs):
                signals.sleep(0.1)
