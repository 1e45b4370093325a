"""What of a run is worth a row: its figures at most once a second, and its story in words."""

from __future__ import annotations

import html
import re
from collections import deque
from dataclasses import dataclass, field

from shoal.core.membership.state import TRAINER
from shoal.wire.api import MemberView, RunView, StoryLine

EVERY_S = 1.0
# TensorBoard draws a thousand points of a line; an old run needs no more of them for having become old.
ROWS_PER_AGE = 3600
MANY = 32
LINES_PER_STEP = 50
MAX_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class EventRow:
    """What one event of a file holds."""

    at: float
    step: int
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class RunRows:
    """Turns the views and the story of one run into rows.

    TensorBoard takes an event whose step is not above that of the one before for a training that was set back, and
    forgets the other. For figures that is as it should be. What is told is kept from it: its steps never go back, and
    all that is told of one step is told again with whatever is added to it.
    """

    def __init__(self, step: int) -> None:
        # Another file may have told of this step before.
        self._told_step = step + 1 if step else 0
        self._told: dict[str, deque[StoryLine]] = {}
        self._fresh: dict[str, float] = {}
        self._rows: list[EventRow] = []
        self._shown_at: float | None = None
        self._shown_step = -1
        self._shown: dict[str, float] = {}

    def add_view(self, view: RunView, step_s: float, now: float) -> None:
        """Take the figures of this moment, unless there is no news, or they come too soon after the last ones."""
        over = view.ended is not None
        if self._shown_at is not None and not over and now - self._shown_at < _gap_s(view, now):
            return
        step, found = _step(view), scalars_of(view, step_s)
        if step == self._shown_step:
            found = {tag: value for tag, value in _lasting(found).items() if self._shown.get(tag) != value}
        if found and (step or view.metrics):
            self._rows.append(EventRow(now, step, scalars=found))
            self._shown_at, self._shown_step = now, step
            self._shown.update(found)

    def add_line(self, line: StoryLine, step: int) -> None:
        """Take a line of the story; `step` is where the run is, if the line does not say it."""
        step = step if line.step is None else line.step
        if step > self._told_step:
            self._rows += self._fresh_texts()
            self._told_step = step
            self._told.clear()
        tag = tag_of(line)
        self._told.setdefault(tag, deque(maxlen=LINES_PER_STEP)).append(line)
        self._fresh[tag] = line.at

    @property
    def pending(self) -> bool:
        return bool(self._rows or self._fresh)

    def take(self) -> list[EventRow]:
        """The rows since the last call, oldest first."""
        rows = [*self._rows, *self._fresh_texts()]
        self._rows.clear()
        return rows

    def _fresh_texts(self) -> list[EventRow]:
        rows = [
            EventRow(at, self._told_step, texts={tag: "\n\n".join(map(sentence, self._told[tag]))})
            for tag, at in self._fresh.items()
        ]
        self._fresh.clear()
        return rows


def scalars_of(view: RunView, step_s: float) -> dict[str, float]:
    """The scalars of a run by tag; what is not known is left out."""
    known = {
        "training/loss": view.loss,
        "training/epoch": view.epoch,
        "speed/samples_per_s": view.samples_per_s or None,
        "speed/step_s": step_s or None,
        "batch/samples": view.batch or None,
        "batch/noise_scale": view.noise,
        "idle/now": view.idle_now,
        "idle/with_equal_shares": view.idle_before,
        "world/size": view.world_size or None,
        "world/number": view.world,
        "world/members_lost": view.losses,
    }
    found = {tag: float(value) for tag, value in known.items() if value is not None}
    found |= {f"metrics/{name}": float(value) for name, value in view.metrics.items()}
    if view.evaluation is not None:
        # At the step where the training is, because steps in one file must not go back.
        found |= {f"evaluation/{name}": float(value) for name, value in view.evaluation.metrics.items()}
    return found | {f"shares/{one.member}": float(one.share) for one in _training(view)}


def tag_of(line: StoryLine) -> str:
    """Under which heading a line is told: worlds, decisions, or the story of all else."""
    if line.kind.endswith("Decided"):
        return "decisions"
    return "worlds" if line.text.startswith(("world ", "placement ")) else "story"


def sentence(line: StoryLine) -> str:
    """A line as Markdown; what users' code has said is shown as it is."""
    told = _escaped(line.text)
    return f"{told}: {_escaped(line.reason)}" if line.reason and line.reason not in line.text else told


def _escaped(text: str) -> str:
    plain = html.escape(text[:MAX_CHARACTERS], quote=False)
    return re.sub(r"([\\`*_\[\]])", r"\\\1", plain)


def _training(view: RunView) -> list[MemberView]:
    """Those who have said what they do; a share of 0 is a member that is parked."""
    return [one for one in view.members if one.role == TRAINER and one.status == "training" and one.phase]


def _step(view: RunView) -> int:
    """Where the members are: behind what the run had reached, if it was set back to a checkpoint."""
    return max((one.step for one in view.members if one.status == "training" and one.step), default=view.step)


def _gap_s(view: RunView, now: float) -> float:
    return max(EVERY_S, (now - view.started) / ROWS_PER_AGE) * max(1.0, len(view.members) / MANY)


def _lasting(found: dict[str, float]) -> dict[str, float]:
    """What the script and its evaluator say; all else is not news while the step is the same."""
    return {tag: value for tag, value in found.items() if tag.startswith(("metrics/", "training/", "evaluation/"))}
