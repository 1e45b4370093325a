"""Shows a run as plain lines, or as one JSON object a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import click
import msgspec

from shoal.cli.output import table
from shoal.wire.api import CostView, MemberView, RunView, StoryLine

PROGRESS_EVERY_S = 10.0
SHARES = "SharesDecided"
SHARES_TOLD = 3
PARTS = ("data", "compute", "wait", "exchange")


class Display(Protocol):
    """Shows a run as it goes."""

    def logs(self, lines: Sequence[tuple[str, str]]) -> None: ...
    def story(self, lines: Sequence[StoryLine]) -> None: ...
    def view(self, view: RunView) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def sentence(line: StoryLine) -> str:
    """A line of the story with its reason."""
    return f"{line.text} ({line.reason})" if line.reason and line.reason not in line.text else line.text


def progress(view: RunView) -> str:
    """Where a run is, in one line."""
    total = f"/{table.count(view.total_steps)}" if view.total_steps else ""
    parts = [f"step {table.count(view.step)}{total}", f"epoch {view.epoch}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4g}")
    if view.samples_per_s:
        parts.append(f"{table.count(view.samples_per_s)} samples/s")
    parts.append(members(view))
    return "  ".join(parts) if view.status == "training" else "  ".join([view.status, *parts, view.reason]).rstrip()


def members(view: RunView) -> str:
    """The world in words, and how many members were asked for."""
    servers = sum(member.status == "serving" for member in view.members)
    if servers:
        bounds = f"{view.members_min}:{view.members_max}"
        return f"{view.world_size} trainers ({bounds}) and {servers} servers"
    if view.world is None:
        return "no world"
    bounds = f"{view.members_min}:{view.members_max}" if view.members_min != view.members_max else str(view.members_max)
    return f"world {view.world} with {view.world_size} members ({bounds})"


def evaluation(view: RunView) -> str:
    """What the latest evaluation found, and the best one; empty if there was none."""
    found = view.evaluation
    if found is None:
        return ""
    figures = ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items()) or "no number"
    text = f"step {table.count(found.step)}: {figures}"
    if found.best_value is not None and found.best_step is not None:
        metric = found.best.partition(":")[2]
        text += f"; best {metric} {found.best_value:.4g} at step {table.count(found.best_step)}"
    if found.without and found.patience is not None:
        text += f", {found.without} of {found.patience} evaluations without a better one"
    return text


def efficiency(view: RunView) -> list[str]:
    """The global batch, what its noise says of it, and how much of the members' time is waited away."""
    parts = [f"batch {table.count(view.batch)}"] if view.batch else []
    if view.noise is not None:
        parts.append(f"noise scale {_scale(view.noise)}")
    if view.idle_now is not None:
        before = f" ({table.percent(view.idle_before)} with equal shares)" if view.idle_before is not None else ""
        parts.append(f"idle {table.percent(view.idle_now)}{before}")
    return parts


def spent(one: MemberView) -> tuple[str, ...]:
    """Where the time of a member's usual step goes, under the heads PARTS; empty until it is known."""
    parts_s = (one.data_s, one.compute_s, one.wait_s, one.exchange_s)
    return tuple(table.short(part_s) if any(parts_s) else "" for part_s in parts_s)


def decisions(view: RunView) -> list[tuple[str, str]]:
    """The latest change of each kind that members decided on, and why; of many that lack memory, the last."""
    latest = {one.what: one for one in sorted(view.decided, key=lambda one: one.step)}
    more = sum(one.what == "memory" for one in view.decided) - 1
    others = f" (and {more} more members have a limit)" if more > 0 else ""
    return [
        (what, f"from step {table.count(one.step)} on: {one.reason}{others if what == 'memory' else ''}")
        for what, one in sorted(latest.items())
    ]


def saved(step: int, path: str) -> str:
    """The newest checkpoint, and where it is if that is known."""
    return f"step {table.count(step)}" + (f", {path}" if path else "")


def event_files(where: str, error: str) -> str:
    """Where TensorBoard finds a run, or why not."""
    return f"not written: {error} ({where})" if error else where


def _scale(noise: float) -> str:
    return table.count(noise) if noise >= 10 else f"{noise:.2g}"


class PlainOutput:
    """One line for each thing that happens, and one for the progress now and then."""

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
        self._told, self._untold, self._tell_at = 0, 0, 0.0

    def logs(self, lines: Sequence[tuple[str, str]]) -> None:
        for member, text in lines:
            self._say(f"{member} | {text}")

    def story(self, lines: Sequence[StoryLine]) -> None:
        for line in lines:
            if line.kind != SHARES:
                self.note(sentence(line))
            elif self._may_tell():
                more = f"; changes before it that were not told: {self._untold}" if self._untold else ""
                self.note(sentence(line) + more)
                self._untold = 0
            else:
                self._untold += 1

    def _may_tell(self) -> bool:
        """The first changes of shares are told as they come, later ones now and then."""
        now = self._clock()
        if self._told >= SHARES_TOLD and now < self._tell_at:
            return False
        self._told, self._tell_at = self._told + 1, now + self._every_s
        return True

    def view(self, view: RunView) -> None:
        now = self._clock()
        shown = (view.status, view.step, "" if view.status == "training" else view.reason)
        if self._quiet or now < self._next_at or shown == self._shown:
            return
        self._next_at = now + self._every_s
        self._shown = shown
        self._say(progress(view))

    def note(self, text: str) -> None:
        if not self._quiet:
            self._say(f"shoal: {text}")

    def close(self) -> None:
        return


class JsonLines:
    """One JSON object a line, each with an `event`."""

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
    """Passes everything on until the terminal is gone; then the run must still be stopped in order."""

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


def cost(found: CostView) -> str:
    """What a run's machines have cost."""
    parts = [f"{found.machine_s / 3600:.2f} machine hours"]
    if found.spent:
        parts.append(f"{found.spent:.2f} spent")
    if found.saved:
        parts.append(f"{found.saved:.2f} saved")
    return ", ".join(parts)


def budget(view: RunView) -> str:
    """What a run may spend, and how long that lasts for what it has."""
    spent = view.cost.spent if view.cost is not None else 0.0
    left = max(0.0, (view.budget or 0.0) - spent)
    text = f"{view.budget or 0.0:.2f}, {left:.2f} left"
    if view.rate_per_h and view.ended is None:
        text += f", which pays {view.rate_per_h:.2f} an hour for {table.span(left / view.rate_per_h * 3600)}"
    return text
