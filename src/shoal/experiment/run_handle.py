"""Handle of a run that was started from Python: status, metrics, logs, stop and scale.

The handle keeps no state of the run. Each question looks up the coordinator of the run's directory, live or ended, as
`shoal status` does; so it works for attached and detached runs, and after the run. A coordinator that is being
restarted looks ended for a moment; questions are therefore repeated for a while as long as a supervisor lives.
"""

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
from shoal.launch.download import LocalRunFolder, download
from shoal.launch.run_lookup import ENDED, RunRecords
from shoal.launch.run_request import parse_members
from shoal.wire.api import LogPage, RunView, ScaleRequest, StopRequest, StoryLine

T = TypeVar("T")
PAGE = 1000
POLL_S = 0.2
# A coordinator that died is back within this time if its supervisor lives.
RESTART_WITHIN_S = 10.0


class Story(tuple[StoryLine, ...]):
    """What happened to a run, and why; prints as one line for each event."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(_sentence(line) for line in self) or "nothing has happened yet"

    __str__ = __repr__


class RunHandle:
    """A run that `shoal.run` has started; usable while it is active and after it has ended."""

    def __init__(self, directory: Path, view: RunView, supervisor: SupervisorThread | None) -> None:
        self._directory, self._supervisor = directory, supervisor
        self.id = view.run
        self.name = view.name

    def __repr__(self) -> str:
        view = self.view()
        return f"<run {self.id}: {view.status}, step {view.step}>"

    @property
    def directory(self) -> Path:
        """The members' working directory, with the files given to `shoal.run` and those that members write."""
        return self._directory / "work"

    def view(self) -> RunView:
        """Return everything known about the run now."""
        return self._query(lambda records: records.run(self.id))

    def status(self) -> str:
        """Return starting, training, waiting, stopping, done, failed, stopped or resumable."""
        return self.view().status

    def metrics(self) -> dict[str, float]:
        """Return the latest metrics of trainers and evaluator, with `step` and `epoch`.

        An evaluator's metric that the trainers report too is called ``val_…``.
        """
        view = self.view()
        metrics = {"step": float(view.step), "epoch": float(view.epoch)}
        if view.loss is not None:
            metrics["loss"] = view.loss
        metrics |= view.metrics
        evaluated = view.evaluation.metrics if view.evaluation is not None else {}
        return metrics | {f"val_{name}" if name in metrics else name: value for name, value in evaluated.items()}

    def story(self) -> Story:
        """Return what happened to the run, and why."""
        lines: list[StoryLine] = []
        while page := self._query(lambda records: records.story(self.id, "", lines[-1].seq if lines else 0, PAGE)):
            lines.extend(page)
        return Story(lines)

    def logs(self, member: str = "") -> str:
        """Return what all members printed, each line with its member, or what one member printed.

        Raises UsageError if the run never had that member.
        """
        if member:
            self._query(lambda records: run_lookup.check_member(records, records.run(self.id), member))
        output: list[str] = []
        after = 0
        while True:
            page = self._query(partial(self._log_page, member, after))
            if not page.lines:
                return "\n".join(output)
            output += [text if member else f"{name} | {text}" for name, text in page.lines]
            after = page.next

    def _log_page(self, member: str, after: int, records: RunRecords) -> LogPage:
        return records.logs(self.id, member, after, PAGE)

    def wait(self, timeout_s: float | None = None) -> RunView:
        """Block until the run has ended; raise RunFailed if it failed, TimeoutError if that takes too long."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._has_ended():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} is still active after {timeout_s:g} s")
            time.sleep(POLL_S)
        if self._supervisor is not None:
            self._supervisor.join()
            if self._supervisor.failure is not None:
                raise self._supervisor.failure
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
        """Download the files that remote members have saved so far; return the names of the new ones.

        They go to the run's `directory`, where local members save them, or to `to`. `wait` does this by itself.
        """
        return download(LocalRunFolder(self._directory, self.id), Path(to) if to is not None else self.directory).names

    def stop(self, reason: str = StopRequest().reason, *, checkpoint: bool = True, timeout_s: float = 60.0) -> RunView:
        """Stop the run, by default after a checkpoint; `shoal resume` continues from the newest checkpoint."""
        request = StopRequest(reason) if checkpoint else StopRequest(reason, checkpoint=False, grace_s=1.0)
        if not self._has_ended():
            run_lookup.require_live(run_lookup.coordinator_in(self._directory)).stop(self.id, request)
        return self.wait(timeout_s)

    def scale(self, count: int | str) -> RunView:
        """Change the number of members: a number, or MIN:MAX."""
        low, high = parse_members(str(count), "run.scale")
        client = run_lookup.require_live(run_lookup.coordinator_in(self._directory))
        return client.scale(self.id, ScaleRequest(low, high))

    def _is_supervised(self) -> bool:
        return self._supervisor is not None and self._supervisor.is_alive()

    def _has_ended(self) -> bool:
        """Return whether the run has ended; while its coordinator restarts, it looks resumable for a moment."""
        if self._supervisor is not None:
            return not self._is_supervised()
        since = time.monotonic()
        while (status := self.status()) in ENDED:
            if status != "resumable" or time.monotonic() - since > RESTART_WITHIN_S:
                return True
            time.sleep(POLL_S)
        return False

    def _query(self, question: Callable[[RunRecords], T]) -> T:
        """Query the live coordinator or its records; retry while it may be restarting or shutting down."""
        deadline = time.monotonic() + RESTART_WITHIN_S
        while True:
            coordinator = run_lookup.coordinator_in(self._directory)
            try:
                if coordinator.client is None and self._is_supervised() and time.monotonic() < deadline:
                    raise CoordinatorUnreachable("the coordinator is restarting or has just ended")
                return question(coordinator.records)
            except CoordinatorUnreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)
            finally:
                if coordinator.client is not None:
                    coordinator.client.close()


def _sentence(line: StoryLine) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(line.at))
    step = f" step {line.step}" if line.step is not None else ""
    why = f" ({line.reason})" if line.reason and line.reason not in line.text else ""
    return f"{moment}{step}: {line.text}{why}"
