"""The follower: polls a run until it has ended, shows what is new, and turns signals into stop requests.

A coordinator may be slow, dead and about to be restarted, or frozen. So every request runs in a thread of its own, and
signals are noticed while it is under way. Each wait has a limit: a coordinator that is silent for `SILENCE_LIMIT_S`
ends the command; one that a signal waits for is given up after `UNHEARD_LIMIT_S`, or at the next signal; one that was
told to stop at once has `STOP_NOW_TIMEOUT_S`. Giving up ends the processes that `shoal run` has started, and none of a
standing coordinator's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.cli.output.lines import Display
from shoal.cli.output.tracebacks import TracebackLog
from shoal.cli.signals import SignalCounter
from shoal.errors import CoordinatorUnreachable
from shoal.launch.api_client import ApiClient
from shoal.launch.run_lookup import ENDED
from shoal.wire.api import LogPage, RunView, StopRequest, StoryLine

T = TypeVar("T")
PAGE = 1000
STORY_KEPT = 5000
SILENCE_LIMIT_S = 600.0
STOP_NOW_TIMEOUT_S = 5.0
# For a coordinator that does not answer while a signal waits for it: when that is said, and when it is given up.
UNHEARD_NOTE_S, UNHEARD_LIMIT_S = 1.0, 30.0
ASK_POLL_S = 0.1
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
        self._unheard_since: float | None = None
        self._unheard_noted = self._given_up = False
        self.result = FollowResult(view, tracebacks=TracebackLog(collapse))

    def follow(self, signals: SignalCounter, interval_s: float) -> FollowResult:
        """Block until the run has ended or the user has abandoned it with repeated signals."""
        handled, stop_deadline = 0, 0.0
        while True:
            for note in self._restart_services():
                self._display.note(note)
            reached = self._poll(signals, handled)
            if self.result.view.status in ENDED:
                self._drain(signals)
                if held_back := self.result.tracebacks.flush():
                    self._display.logs(held_back)
                return self.result
            if reached and signals.count > handled and self._stop(signals, handled):
                handled = min(signals.count, 2)
                stop_deadline = time.monotonic() + STOP_NOW_TIMEOUT_S
            late = handled >= 2 and time.monotonic() > stop_deadline
            if signals.count > 2 or late or self._is_unheard(signals, handled):
                self.result.abandoned = True
                return self.result
            signals.sleep(0.1 if handled else interval_s)

    def _is_unheard(self, signals: SignalCounter, handled: int) -> bool:
        """Return whether to give up a coordinator that cannot be told of a signal; say so before."""
        now = time.monotonic()
        if self._given_up or signals.count <= handled:
            self._unheard_since, self._unheard_noted = None, False
            return self._given_up
        if self._unheard_since is None:
            self._unheard_since = now
        limit_s = STOP_NOW_TIMEOUT_S if handled else UNHEARD_LIMIT_S
        if not self._unheard_noted and now - self._unheard_since > UNHEARD_NOTE_S:
            self._unheard_noted = True
            self._display.note(
                f"the coordinator does not answer, so {signals.name} cannot stop the run after a checkpoint; waiting "
                f"{limit_s:g} s for it; {signals.name} again gives it up"
            )
        if signals.count < handled + 2 and now - self._unheard_since < limit_s:
            return False
        self._display.note("giving the coordinator up; the newest checkpoint stays")
        self._given_up = True
        return True

    def _ask(self, request: Callable[[], T], signals: SignalCounter, handled: int) -> T:
        """Return the answer to a request; raise CoordinatorUnreachable, also when the user has waited long enough.

        The request runs in a thread: a coordinator that is frozen does not answer for a long time, and signals have to
        be noticed meanwhile.
        """
        outcome: Future[T] = Future()
        threading.Thread(target=_resolve, args=(outcome, request), daemon=True).start()
        while not futures.wait([outcome], ASK_POLL_S).done:
            if self._is_unheard(signals, handled):
                raise CoordinatorUnreachable("the coordinator did not answer in time", where=self._client.url)
        return outcome.result()

    def _poll(self, signals: SignalCounter, handled: int) -> bool:
        """Fetch and show what is new; return whether the coordinator answered."""
        try:
            view, lines, page = self._ask(self._fetch, signals, handled)
        except CoordinatorUnreachable:
            self._note_silence()
            return False
        if self._silent_since is not None:
            self._display.note("the coordinator is back")
            self._silent_since = None
        self._show_new_lines(lines, page)
        self.result.view = view
        self._display.view(view)
        return True

    def _fetch(self) -> tuple[RunView, tuple[StoryLine, ...], LogPage]:
        run = self.result.view.run
        view = self._client.run(run)
        lines = self._client.story(run, after=self._after_story, limit=PAGE)
        return view, lines, self._client.logs(run, after=self._after_logs, limit=PAGE)

    def _show_new_lines(self, lines: tuple[StoryLine, ...], page: LogPage) -> None:
        if lines:
            self._after_story = lines[-1].seq
            new_lines = [line for line in lines if line.at >= self._since]
            self.result.story = [*self.result.story, *new_lines][-STORY_KEPT:]
            # The view of the previous poll is older than these lines: a world that begins before its step lost some.
            formed = [line.world for line in new_lines if line.kind == "FormWorld" and line.world is not None]
            self.result.reached |= dict.fromkeys(formed, self.result.view.step)
            self._display.story(new_lines)
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

    def _stop(self, signals: SignalCounter, handled: int) -> bool:
        """Request the stop that the signals so far mean; return whether the coordinator has accepted it."""
        if signals.count >= 2:
            note = "stopping now, without a checkpoint"
            request = StopRequest(f"second {signals.name}", checkpoint=False, grace_s=1.0)
        else:
            note = f"stopping after a checkpoint; {signals.name} again stops without one"
            request = StopRequest(signals.name)
        self._display.note(note)
        try:
            self._ask(lambda: self._client.stop(self.result.view.run, request), signals, handled)
        except CoordinatorUnreachable:
            self._note_silence()
            return False
        return True

    def _drain(self, signals: SignalCounter) -> None:
        """Show the lines that arrive shortly after the end: exits are reported after the run's last state."""
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            before = (self._after_story, self._after_logs)
            try:
                _, lines, page = self._fetch()
            except CoordinatorUnreachable:
                return
            self._show_new_lines(lines, page)
            if before == (self._after_story, self._after_logs):
                signals.sleep(0.1)


def _resolve(outcome: Future[T], request: Callable[[], T]) -> None:
    """Carry out a request and put its answer or its error into `outcome`."""
    try:
        outcome.set_result(request())
    except Exception as error:  # noqa: BLE001 - raised where the outcome is awaited
        outcome.set_exception(error)
