"""Rows of an event file: scalars from the views of a run, at most once a second, and texts from its story."""

from __future__ import annotations

import html
import re
from collections import deque
from dataclasses import dataclass, field

from shoal.core.membership.state import TRAINER
from shoal.wire.api import MemberView, RunView, StoryLine

EVERY_S = 1.0
# TensorBoard draws a thousand points of a line, so a long run needs no more rows than a short one.
ROWS_PER_AGE = 3600
MANY_MEMBERS = 32
LINES_PER_STEP = 50
MAX_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class EventRow:
    """Scalars and texts of one moment, by tag."""

    at: float
    step: int
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class RunRows:
    """Converts the views and the story of one run into rows; the folder's docstring explains the rules for steps."""

    def __init__(self, step: int) -> None:
        # An earlier file may already hold texts of this step.
        self._text_step = step + 1 if step else 0
        self._lines: dict[str, deque[StoryLine]] = {}
        self._updated_at: dict[str, float] = {}
        self._rows: list[EventRow] = []
        self._last_at: float | None = None
        self._last_step = -1
        self._last_scalars: dict[str, float] = {}

    def add_view(self, view: RunView, step_s: float, now: float) -> None:
        """Add a row of scalars, unless nothing is new or the last row is too recent."""
        ended = view.ended is not None
        if self._last_at is not None and not ended and now - self._last_at < _gap_s(view, now):
            return
        step, scalars = _step(view), scalars_of(view, step_s)
        if step == self._last_step:
            scalars = {tag: value for tag, value in _metrics(scalars).items() if self._last_scalars.get(tag) != value}
        if scalars and (step or view.metrics):
            self._rows.append(EventRow(now, step, scalars=scalars))
            self._last_at, self._last_step = now, step
            self._last_scalars.update(scalars)

    def add_line(self, line: StoryLine, step: int) -> None:
        """Add a line of the story; `step` is that of the run, for lines without one."""
        step = step if line.step is None else line.step
        if step > self._text_step:
            self._rows += self._take_texts()
            self._text_step = step
            self._lines.clear()
        tag = tag_of(line)
        self._lines.setdefault(tag, deque(maxlen=LINES_PER_STEP)).append(line)
        self._updated_at[tag] = line.at

    @property
    def pending(self) -> bool:
        return bool(self._rows or self._updated_at)

    def take(self) -> list[EventRow]:
        """Return the rows since the last call, oldest first."""
        rows = [*self._rows, *self._take_texts()]
        self._rows.clear()
        return rows

    def _take_texts(self) -> list[EventRow]:
        """Return one row for each tag with new lines, with all lines of the current step."""
        rows = [
            EventRow(at, self._text_step, texts={tag: "\n\n".join(map(sentence, self._lines[tag]))})
            for tag, at in self._updated_at.items()
        ]
        self._updated_at.clear()
        return rows


def scalars_of(view: RunView, step_s: float) -> dict[str, float]:
    """Return the scalars of a run by tag, without those that are unknown."""
    values = {
        "training/loss": view.loss,
        "training/epoch": view.epoch,
        "speed/samples_per_s": view.samples_per_s or None,
        "speed/step_s": step_s or None,
        "speed/seconds_left": view.forecast.seconds if view.forecast is not None else None,
        "batch/samples": view.batch or None,
        "batch/noise_scale": view.noise,
        "idle/now": view.idle_now,
        "idle/with_equal_shares": view.idle_before,
        "world/size": view.world_size or None,
        "world/number": view.world,
        "world/members_lost": view.losses,
    }
    scalars = {tag: float(value) for tag, value in values.items() if value is not None}
    scalars |= {f"metrics/{name}": float(value) for name, value in view.metrics.items()}
    if view.evaluation is not None:
        # At the step of the training, not of the evaluated checkpoint: steps in one file must not go back.
        scalars |= {f"evaluation/{name}": float(value) for name, value in view.evaluation.metrics.items()}
    return scalars | {f"shares/{member.member}": float(member.share) for member in _training(view)}


def tag_of(line: StoryLine) -> str:
    """Return the tag of a story line: "decisions", "worlds" or "story"."""
    # The story names adjustments by what changed: SharesDecided, BatchDecided, MemoryDecided.
    if line.kind.endswith("Decided"):
        return "decisions"
    return "worlds" if line.text.startswith(("world ", "placement ")) else "story"


def sentence(line: StoryLine) -> str:
    """Return a line as Markdown, with special characters escaped."""
    text = _escaped(line.text)
    return f"{text}: {_escaped(line.reason)}" if line.reason and line.reason not in line.text else text


def _escaped(text: str) -> str:
    without_html = html.escape(text[:MAX_CHARACTERS], quote=False)
    return re.sub(r"([\\`*_\[\]])", r"\\\1", without_html)


def _training(view: RunView) -> list[MemberView]:
    """Return the trainers that have reported; one with share 0 is parked."""
    return [
        member for member in view.members if member.role == TRAINER and member.status == "training" and member.phase
    ]


def _step(view: RunView) -> int:
    """Return the step of the members, which is behind that of the run after a return to a checkpoint."""
    return max(
        (member.step for member in view.members if member.status == "training" and member.step), default=view.step
    )


def _gap_s(view: RunView, now: float) -> float:
    return max(EVERY_S, (now - view.started) / ROWS_PER_AGE) * max(1.0, len(view.members) / MANY_MEMBERS)


def _metrics(scalars: dict[str, float]) -> dict[str, float]:
    """Return what the script and the evaluator report; the rest cannot be new while the step is the same."""
    return {tag: value for tag, value in scalars.items() if tag.startswith(("metrics/", "training/", "evaluation/"))}
