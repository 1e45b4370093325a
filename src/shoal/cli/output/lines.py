"""A run as plain lines or JSON lines, and the phrases that all displays share.

A display gets everything that the follower sees: members' output, lines of the story, a view of the run at every poll,
and notes of the command itself. Plain output prints the first two as they come and condenses the views to a progress
line every few seconds. JSON output drops nothing but repeated views.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import click
import msgspec

from shoal.cli.output import table
from shoal.core.nouns import counted, plural
from shoal.wire.api import CostView, MemberView, RunView, StoryLine

PROGRESS_EVERY_S = 10.0
SHARES = "SharesDecided"
# The first changes of shares are printed as they come; later ones at most once per progress line.
SHARES_AT_ONCE = 3
STEP_PARTS = ("data", "compute", "wait", "exchange")


class Display(Protocol):
    """A place where a run is shown while it is active."""

    def logs(self, lines: Sequence[tuple[str, str]]) -> None: ...
    def story(self, lines: Sequence[StoryLine]) -> None: ...
    def view(self, view: RunView) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def sentence(line: StoryLine) -> str:
    """Return a line of the story with its reason, unless the text contains it already."""
    return f"{line.text} ({line.reason})" if line.reason and line.reason not in line.text else line.text


def progress(view: RunView) -> str:
    """Return the progress of a run in one line."""
    total = f"/{table.count(view.total_steps)}" if view.total_steps else ""
    parts = [f"step {table.count(view.step)}{total}", f"epoch {view.epoch}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4g}")
    if view.samples_per_s:
        parts.append(f"{table.count(view.samples_per_s)} samples/s")
    parts += [members(view), *filter(None, [time_left(view)])]
    return "  ".join(parts) if view.status == "training" else "  ".join([view.status, *parts, view.reason]).rstrip()


def time_left(view: RunView) -> str:
    """Return the time left in a few words, empty if it is not known."""
    forecast = view.forecast
    return f"about {table.rough(forecast.seconds)} left" if forecast and forecast.seconds is not None else ""


def forecast(view: RunView) -> str:
    """Return the time left with its interval, its source and what it will cost, or why it is unknown."""
    left = view.forecast
    if left is None:
        return ""
    if left.seconds is None:
        return f"unknown: {left.unknown}"
    bounds = f"{table.rough(left.low_s)} to {table.rough(left.high_s)} in {table.percent(left.coverage)} of cases"
    parts = [f"about {table.rough(left.seconds)} ({bounds}), from {left.source}"]
    if view.rate_per_h:
        parts.append(f"{view.rate_per_h * left.seconds / 3600:.2f} more to spend")
    return "; ".join([*parts, left.changed] if left.changed else parts)


def members(view: RunView) -> str:
    """Return the size of the world, and the bounds that were asked for."""
    servers = sum(member.status == "serving" for member in view.members)
    if servers:
        bounds = f"{view.members_min}:{view.members_max}"
        return f"{counted(view.world_size, 'trainer')} ({bounds}) and {counted(servers, 'server')}"
    if view.world is None:
        return "no world"
    bounds = f"{view.members_min}:{view.members_max}" if view.members_min != view.members_max else str(view.members_max)
    return f"world {view.world} with {counted(view.world_size, 'member')} ({bounds})"


def evaluation(view: RunView) -> str:
    """Return the latest evaluation and the best one; empty if there was none."""
    latest = view.evaluation
    if latest is None:
        return ""
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in latest.metrics.items()) or "no metrics"
    text = f"step {table.count(latest.step)}: {metrics}"
    if latest.best_value is not None and latest.best_step is not None:
        metric = latest.best.partition(":")[2]
        text += f"; best {metric} {latest.best_value:.4g} at step {table.count(latest.best_step)}"
    if latest.without and latest.patience is not None:
        text += f", no improvement in {latest.without} of {counted(latest.patience, 'evaluation')}"
    return text


def efficiency(view: RunView) -> list[str]:
    """Return the global batch size, its gradient noise scale, and the share of time that members spend waiting."""
    parts = [f"batch {table.count(view.batch)}"] if view.batch else []
    if view.noise is not None:
        parts.append(f"noise scale {_scale(view.noise)}")
    if view.idle_now is not None:
        before = f" ({table.percent(view.idle_before)} with equal shares)" if view.idle_before is not None else ""
        parts.append(f"idle {table.percent(view.idle_now)}{before}")
    return parts


def step_times(member: MemberView) -> tuple[str, ...]:
    """Return how long the parts of a member's usual step take, in the order of STEP_PARTS; empty until measured."""
    parts_s = (member.data_s, member.compute_s, member.wait_s, member.exchange_s)
    return tuple(table.short(part_s) if any(parts_s) else "" for part_s in parts_s)


def adjustments(view: RunView) -> list[tuple[str, str]]:
    """Return the latest adjustment of each kind (shares, batch, memory) with its reason."""
    latest = {adjustment.what: adjustment for adjustment in sorted(view.decided, key=lambda decided: decided.step)}
    limited = sum(adjustment.what == "memory" for adjustment in view.decided) - 1
    others = f" (and {limited} more {plural(limited, 'member')} with a limit)" if limited > 0 else ""
    return [
        (what, f"from step {table.count(adjustment.step)}: {adjustment.reason}{others if what == 'memory' else ''}")
        for what, adjustment in sorted(latest.items())
    ]


def checkpoint(step: int, path: str) -> str:
    """Return the step of a checkpoint, and its path if that is known."""
    return f"step {table.count(step)}" + (f", {path}" if path else "")


def resume_advice(run: str, step: int, checkpoint_step: int | None, options: str = "") -> str:
    """Return the command that resumes a run, and truthfully where that continues: at its checkpoint, or at step 0."""
    command = f"shoal resume {run}{options}"
    if checkpoint_step is None:
        return f"{command} starts over at step 0: there is no checkpoint"
    repeated = step - checkpoint_step
    again = "" if repeated <= 0 else f" and repeats {counted(repeated, 'step')}"
    return f"{command} continues at step {table.count(checkpoint_step)}{again}"


def event_files(where: str, error: str) -> str:
    """Return where TensorBoard finds a run's event files, or why they are not written."""
    return f"not written: {error} ({where})" if error else where


def _scale(noise: float) -> str:
    return table.count(noise) if noise >= 10 else f"{noise:.2g}"


class PlainOutput:
    """A line for each event, and one for the progress every few seconds."""

    def __init__(
        self,
        say: Callable[[str], None] = click.echo,
        clock: Callable[[], float] = time.monotonic,
        quiet: bool = False,
        every_s: float = PROGRESS_EVERY_S,
    ) -> None:
        self._say = say
        self._clock = clock
        self._quiet = quiet
        self._every_s = every_s
        self._next_at = 0.0
        self._shown = ("", -1, "")
        self._shares_shown, self._shares_skipped, self._shares_due_at = 0, 0, 0.0

    def logs(self, lines: Sequence[tuple[str, str]]) -> None:
        for member, text in lines:
            self._say(f"{member} | {text}")

    def story(self, lines: Sequence[StoryLine]) -> None:
        for line in lines:
            if line.kind == "ProcessStarted":
                continue  # its start is told already; process ids are in `shoal why`
            if line.kind != SHARES:
                self.note(sentence(line))
            elif self._may_show_shares():
                skipped = (
                    f"; {self._shares_skipped} earlier {plural(self._shares_skipped, 'change')} not shown"
                    if self._shares_skipped
                    else ""
                )
                self.note(sentence(line) + skipped)
                self._shares_skipped = 0
            else:
                self._shares_skipped += 1

    def _may_show_shares(self) -> bool:
        now = self._clock()
        if self._shares_shown >= SHARES_AT_ONCE and now < self._shares_due_at:
            return False
        self._shares_shown, self._shares_due_at = self._shares_shown + 1, now + self._every_s
        return True

    def view(self, view: RunView) -> None:
        now = self._clock()
        shown = (view.status, view.step, "" if view.status == "training" else view.reason)
        # Why a run failed is in its summary.
        if self._quiet or now < self._next_at or shown == self._shown or view.status == "failed":
            return
        self._next_at = now + self._every_s
        self._shown = shown
        self._say(table.printable(progress(view)))

    def note(self, text: str) -> None:
        if not self._quiet:
            self._say(f"shoal: {table.printable(text)}")

    def close(self) -> None:
        return


class JsonLines:
    """One JSON object per line, each with an `event`: log, story, progress or note."""

    def __init__(self, say: Callable[[str], None] = click.echo) -> None:
        self._say = say
        self._shown: tuple[str, int] = ("", -1)

    def logs(self, lines: Sequence[tuple[str, str]]) -> None:
        for member, text in lines:
            self._put("log", {"member": member, "text": text})

    def story(self, lines: Sequence[StoryLine]) -> None:
        for line in lines:
            self._put("story", msgspec.to_builtins(line))

    def view(self, view: RunView) -> None:
        if (view.status, view.step) != self._shown:
            self._shown = (view.status, view.step)
            self._put("progress", msgspec.to_builtins(view))

    def note(self, text: str) -> None:
        self._put("note", {"text": text})

    def close(self) -> None:
        return

    def _put(self, event: str, fields: dict[str, object]) -> None:
        self._say(msgspec.json.encode({"event": event, **fields}).decode())


class SafeDisplay:
    """A display that goes silent when the terminal is gone, so that the run can still be stopped cleanly."""

    def __init__(self, inner: Display) -> None:
        self._inner = inner
        self._gone = False

    def logs(self, lines: Sequence[tuple[str, str]]) -> None:
        self._try(self._inner.logs, lines)

    def story(self, lines: Sequence[StoryLine]) -> None:
        self._try(self._inner.story, lines)

    def view(self, view: RunView) -> None:
        self._try(self._inner.view, view)

    def note(self, text: str) -> None:
        self._try(self._inner.note, text)

    def close(self) -> None:
        self._inner.close()

    def _try(self, show: Callable[..., None], what: object) -> None:
        if self._gone:
            return
        try:
            show(what)
        except OSError:
            self._gone = True


def cost(view: CostView) -> str:
    """Return what a run's machines have cost."""
    parts = [f"{view.machine_s / 3600:.2f} machine hours"]
    if view.spent:
        parts.append(f"{view.spent:.2f} spent")
    if view.saved:
        parts.append(f"{view.saved:.2f} saved")
    return ", ".join(parts)


def budget(view: RunView) -> str:
    """Return the budget of a run, what remains of it, and for how long at the present rate."""
    spent = view.cost.spent if view.cost is not None else 0.0
    remaining = max(0.0, (view.budget or 0.0) - spent)
    text = f"{view.budget or 0.0:.2f}, {remaining:.2f} left"
    if view.rate_per_h and view.ended is None:
        text += f", enough for {table.span(remaining / view.rate_per_h * 3600)} at {view.rate_per_h:.2f} an hour"
    return text
