"""A run that was started from Python, as who started it sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from shoal.errors import CoordinatorUnreachable, RunFailed
from shoal.experiment.supervisor_thread import SupervisorThread
from shoal.launch import run_lookup
from shoal.launch.download import LocalRunFolder, bring
from shoal.launch.launch_plan import parse_members
from shoal.launch.run_lookup import OVER, RunRecords
from shoal.wire.api import LogPage, RunView, ScaleRequest, StopRequest, StoryLine

T = TypeVar("T")
PAGE = 1000
EVERY_S = 0.2
BACK_WITHIN_S = 10.0


class Story(tuple[StoryLine, ...]):
    """What happened to a run, and why; printed, a line each."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(_told(line) for line in self) or "nothing has happened yet"

    __str__ = __repr__


class RunHandle:
    """What `shoal.run` returns. It can be asked while the run goes on, and after it."""

    def __init__(self, directory: Path, view: RunView, keeper: SupervisorThread | None) -> None:
        self._directory, self._keeper = directory, keeper
        self.id = view.run
        self.name = view.name

    def __repr__(self) -> str:
        view = self.view()
        return f"<run {self.id}: {view.status}, step {view.step}>"

    @property
    def directory(self) -> Path:
        """Where members work: their files, and what they write."""
        return self._directory / "work"

    def view(self) -> RunView:
        """All that is known of the run now."""
        return self._ask(lambda records: records.run(self.id))

    def status(self) -> str:
        """starting, training, waiting, stopping, done, failed, stopped or resumable."""
        return self.view().status

    def metrics(self) -> dict[str, float]:
        """The latest figures: what trainers and evaluators found, and where the run is.

        A figure of the evaluator that the trainers have too is called ``val_…``.
        """
        view = self.view()
        figures = {"step": float(view.step), "epoch": float(view.epoch)}
        if view.loss is not None:
            figures["loss"] = view.loss
        figures |= view.metrics
        found = view.evaluation.metrics if view.evaluation is not None else {}
        return figures | {f"val_{name}" if name in figures else name: value for name, value in found.items()}

    def story(self) -> Story:
        """What happened to the run, and why."""
        lines: list[StoryLine] = []
        while page := self._ask(lambda records: records.story(self.id, "", lines[-1].seq if lines else 0, PAGE)):
            lines.extend(page)
        return Story(lines)

    def logs(self, member: str = "") -> str:
        """What members printed so far, each line with its member; or what one of them did."""
        said: list[str] = []
        after = 0
        while True:
            page = self._ask(partial(self._page_of_logs, member, after))
            if not page.lines:
                return "\n".join(said)
            said += [text if member else f"{who} | {text}" for who, text in page.lines]
            after = page.next

    def _page_of_logs(self, member: str, after: int, records: RunRecords) -> LogPage:
        return records.logs(self.id, member, after, PAGE)

    def wait(self, timeout_s: float | None = None) -> RunView:
        """Return when the run is over; raises RunFailed if it failed, TimeoutError if it goes on after that time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._over():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} goes on after {timeout_s:g} s")
            time.sleep(EVERY_S)
        if self._keeper is not None:
            self._keeper.join()
            if self._keeper.failure is not None:
                raise self._keeper.failure
        self.fetch()
        view = self.view()
        if view.status == "failed":
            raise RunFailed(
                f"run {self.id} failed at step {view.step}",
                where=str(self._directory),
                why=view.reason,
                do=(view.problem.do if view.problem is not None else "")
                or "run.logs() shows what members printed, run.story() what happened",
            )
        return view

    def fetch(self, to: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
        """Bring what members on machines that do not share this disk have saved so far; the names of what is new.

        It goes to the run's `directory`, where it would be if they shared it; `wait` does so by itself.
        """
        return bring(LocalRunFolder(self._directory, self.id), Path(to) if to is not None else self.directory).names

    def stop(self, reason: str = "asked by the user", *, checkpoint: bool = True, timeout_s: float = 60.0) -> RunView:
        """Stop the run, after a checkpoint unless told otherwise; `shoal resume` goes on with it."""
        ask = StopRequest(reason) if checkpoint else StopRequest(reason, checkpoint=False, grace_s=1.0)
        if not self._over():
            run_lookup.live(run_lookup.in_directory(self._directory)).stop(self.id, ask)
        return self.wait(timeout_s)

    def scale(self, count: int | str) -> RunView:
        """Train with so many members from now on: a number, or MIN:MAX."""
        low, high = parse_members(str(count), "run.scale")
        return run_lookup.live(run_lookup.in_directory(self._directory)).scale(self.id, ScaleRequest(low, high))

    def _is_kept(self) -> bool:
        return self._keeper is not None and self._keeper.is_alive()

    def _over(self) -> bool:
        """Whether it is over for good; a coordinator that is being started again looks as if it were."""
        if self._keeper is not None:
            return not self._is_kept()
        since = time.monotonic()
        while (status := self.status()) in OVER:
            if status != "resumable" or time.monotonic() - since > BACK_WITHIN_S:
                return True
            time.sleep(EVERY_S)
        return False

    def _ask(self, question: Callable[[RunRecords], T]) -> T:
        """Ask the coordinator, or what it left; it may be about to end, or to be started again."""
        deadline = time.monotonic() + BACK_WITHIN_S
        while True:
            coordinator = run_lookup.in_directory(self._directory)
            try:
                if coordinator.client is None and self._is_kept() and time.monotonic() < deadline:
                    raise CoordinatorUnreachable("the coordinator is being started again, or has just ended")
                return question(coordinator.records)
            except CoordinatorUnreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(EVERY_S)
            finally:
                if coordinator.client is not None:
                    coordinator.client.close()


def _told(line: StoryLine) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(line.at))
    step = f" step {line.step}" if line.step is not None else ""
    why = f" ({line.reason})" if line.reason and line.reason not in line.text else ""
    return f"{moment}{step}: {line.text}{why}"
