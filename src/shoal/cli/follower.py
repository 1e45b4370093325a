"""Watches a run until it is over, shows what happens, and passes Ctrl-C on to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.cli.output.lines import Display
from shoal.cli.signals import SignalCounter
from shoal.errors import CoordinatorUnreachable
from shoal.launch.api_client import ApiClient
from shoal.launch.run_lookup import OVER
from shoal.wire.api import RunView, StopRequest, StoryLine

PAGE = 1000
STORY_KEPT = 5000
SILENCE_S = 600.0
END_NOW_S = 5.0
LAST_WORDS_S = 0.5


@dataclass
class FollowResult:
    """What was seen of a run."""

    view: RunView
    story: list[StoryLine] = field(default_factory=list)
    abandoned: bool = False


class Follower:
    """One run, one coordinator, one display."""

    def __init__(
        self, client: ApiClient, view: RunView, display: Display, tend: Callable[[], list[str]], since: float = 0.0
    ) -> None:
        self._client = client
        self._display = display
        self._tend = tend
        self._since = since
        self._after_story = 0
        # What a run said before it was resumed is not said again.
        self._after_logs = client.logs(view.run, after=-1, limit=1).next if since else 0
        self._silent_since: float | None = None
        self.seen = FollowResult(view)

    def follow(self, interrupts: SignalCounter, interval_s: float) -> FollowResult:
        """Return when the run is over, or when it was given up by a second interrupt."""
        asked, ended_at = 0, 0.0
        while True:
            for note in self._tend():
                self._display.note(note)
            reached = self._poll()
            if self.seen.view.status in OVER:
                self._last_words(interrupts)
                return self.seen
            if reached and interrupts.count > asked:
                asked = min(interrupts.count, 2)
                self._stop(now=asked >= 2, by=interrupts.name)
                ended_at = time.monotonic() + END_NOW_S
            if interrupts.count > 2 or (asked >= 2 and time.monotonic() > ended_at):
                self.seen.abandoned = True
                return self.seen
            interrupts.sleep(0.1 if asked else interval_s)

    def _poll(self) -> bool:
        """Fetch what is new; whether the coordinator answered."""
        try:
            view = self._client.run(self.seen.view.run)
            self._news()
        except CoordinatorUnreachable:
            self._missed()
            return False
        if self._silent_since is not None:
            self._display.note("the coordinator is back")
            self._silent_since = None
        self.seen.view = view
        self._display.view(view)
        return True

    def _news(self) -> None:
        run = self.seen.view.run
        lines = self._client.story(run, after=self._after_story, limit=PAGE)
        if lines:
            self._after_story = lines[-1].seq
            news = [line for line in lines if line.at >= self._since]
            self.seen.story = [*self.seen.story, *news][-STORY_KEPT:]
            self._display.story(news)
        page = self._client.logs(run, after=self._after_logs, limit=PAGE)
        if page.lines:
            self._display.logs(page.lines)
        self._after_logs = page.next

    def _missed(self) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self._display.note("the coordinator does not answer; members train on without it")
        if now - self._silent_since > SILENCE_S:
            raise CoordinatorUnreachable(
                f"the coordinator has not answered for {SILENCE_S:g} s", where=self._client.url, do="shoal ps"
            )

    def _stop(self, *, now: bool, by: str) -> None:
        if now:
            self._display.note("ending now, without a checkpoint")
            self._client.stop(
                self.seen.view.run, StopRequest(f"{by}, for the second time", checkpoint=False, grace_s=1.0)
            )
            return
        self._display.note("stopping after a checkpoint; once more ends it now")
        self._client.stop(self.seen.view.run, StopRequest(by))

    def _last_words(self, interrupts: SignalCounter) -> None:
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:
            before = (self._after_story, self._after_logs)
            try:
                self._news()
            except CoordinatorUnreachable:
                return
            if before == (self._after_story, self._after_logs):
                interrupts.sleep(0.1)
