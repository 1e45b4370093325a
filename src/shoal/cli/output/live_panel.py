"""The live panel of a run on a terminal; members' output scrolls above it.

`render` is a pure function from a view, the last events and the time to a picture, so tests can draw it. `Panel` only
keeps the last events and hands the picture to rich, which redraws it in place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.cli.output import table
from shoal.cli.output.lines import (
    STEP_PARTS,
    adjustments,
    efficiency,
    evaluation,
    members,
    sentence,
    step_times,
    time_left,
)
from shoal.wire.api import MemberView, RunView, StoryLine

MARGIN = 5
ROWS = 12
EVENTS = 6
WIDE = 110
LONG_S = 5.0
COLOURS = {
    "training": "green",
    "done": "green",
    "starting": "yellow",
    "waiting": "yellow",
    "spare": "cyan",
    "evaluating": "cyan",
    "recovering": "magenta",
    "evicted": "red",
    "rejoining": "magenta",
    "leaving": "magenta",
    "stopping": "magenta",
    "failed": "red",
    "stopped": "yellow",
    "resumable": "yellow",
}
HUES = ("cyan", "green", "yellow", "blue", "magenta", "bright_cyan", "bright_green", "bright_yellow")


class Panel:
    """A panel that is redrawn with each view."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.time) -> None:
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS)
        self._view: RunView | None = None
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def logs(self, lines: Sequence[tuple[str, str]]) -> None:
        block = Text("\n").join(_log_line(member, text) for member, text in lines)
        self._console.print(block, soft_wrap=True)

    def story(self, lines: Sequence[StoryLine]) -> None:
        # The last adjustment of each kind has a line of its own; here they would push out everything else.
        shown = [line for line in lines if not line.kind.endswith("Decided")]
        self._events.extend((line.at, table.printable(sentence(line))) for line in shown)

    def view(self, view: RunView) -> None:
        self._view = view
        self._draw()

    def note(self, text: str) -> None:
        self._events.append((self._clock(), text))
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        if self._view is not None:
            # The terminal echoes ^C after the panel. If that wrapped, the next redraw would start one line too low.
            width = max(MARGIN, self._console.width - MARGIN)
            picture = render(self._view, list(self._events), self._clock(), width)
            self._live.update(Constrain(picture, width), refresh=True)


def render(view: RunView, events: Sequence[tuple[float, str]], now: float, width: int = WIDE) -> RenderableType:
    """Return the panel at one moment; columns that do not fit into its width are left out."""
    gap = "   " if width >= WIDE else "  "
    parts: list[RenderableType] = [_progress(view), Text(table.printable(gap.join(_facts(view, now))))]
    if phrases := efficiency(view):
        parts.append(Text(gap.join(phrases)))
    if evaluated := evaluation(view):
        parts.append(Text.assemble(("evaluated", "dim"), " ", table.printable(evaluated)))
    parts.extend(Text.assemble((what, "dim"), " ", table.printable(reason)) for what, reason in adjustments(view))
    if view.status != "training" and view.reason:
        parts.append(Text(table.printable(view.reason), style="yellow"))
    parts.append(_members(view.members, wide=width >= WIDE))
    parts.extend(_event(at, text) for at, text in events)
    name, status = table.printable(view.name), (view.status, COLOURS.get(view.status, ""))
    title = Text.assemble((name, "bold"), f" · {table.printable(view.run)} · ", status)
    return Box(Group(*parts), title=title, title_align="left", border_style="dim")


def _progress(view: RunView) -> RenderableType:
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    if view.total_steps:
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        share = f"{100.0 * view.step / view.total_steps:.0f} %"
        bar = ProgressBar(total=view.total_steps, completed=view.step)
        line.add_row(f"step {table.count(view.step)} of {table.count(view.total_steps)}", bar, share)
    else:
        line.add_row(f"step {table.count(view.step)}")
    return line


def _facts(view: RunView, now: float) -> list[str]:
    parts = [f"epoch {view.epoch}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4g}")
    parts += [f"{table.count(view.samples_per_s)} samples/s", members(view), table.span(now - view.started)]
    parts += filter(None, [time_left(view)])
    shown = [name for name in view.metrics if name != "loss"][:4]
    return parts + [f"{name} {view.metrics[name]:.4g}" for name in shown]


def _members(views: Sequence[MemberView], *, wide: bool) -> RenderableType:
    """Return a table of members: status, share, and how long the parts of a step take."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    left = ("member", "status", "rank", "phase") if wide else ("member", "status")
    right = ("share", *STEP_PARTS, "samples/s") if wide else ("share", *STEP_PARTS)
    for title in left:
        grid.add_column(title, no_wrap=True)
    for title in right:
        grid.add_column(title, justify="right", no_wrap=True)
    ordered = sorted(views, key=lambda member: (member.rank is None, member.rank or 0, member.member))
    for member in ordered[:ROWS]:
        status = Text(member.status, style=COLOURS.get(member.status, ""))
        rank = "" if member.rank is None else str(member.rank)
        share = str(member.share) if member.rank is not None else ""
        rate = table.count(member.samples_per_s) if member.samples_per_s else ""
        name, times = Text(table.printable(member.member), style=hue(member.member)), step_times(member)
        if wide:
            grid.add_row(name, status, rank, _phase(member), share, *times, rate)
        else:
            grid.add_row(name, _phase(member) if _is_stuck(member) else status, share, *times)
    if len(ordered) > ROWS:
        grid.add_row(Text(f"and {len(ordered) - ROWS} more", style="dim"))
    return grid


def _is_stuck(member: MemberView) -> bool:
    """Return whether a member is silent or long in one phase, which then matters more than its status."""
    silent = not member.connected and member.status not in ("starting", "leaving", "done")
    return silent or (member.connected and member.phase_age_s >= LONG_S)


def _phase(member: MemberView) -> Text:
    if not member.connected and member.status in ("starting", "leaving", "done"):
        return Text("")
    if not member.connected:
        return Text(f"silent for {table.span(member.heartbeat_age_s)}", style="red")
    age = f" for {table.span(member.phase_age_s)}" if member.phase_age_s >= LONG_S else ""
    return Text(f"{table.printable(member.phase)}{age}", style="yellow" if age else "")


def _event(at: float, text: str) -> Text:
    stamp = time.strftime("%H:%M:%S", time.localtime(at))
    return Text.assemble((stamp, "dim"), " ", text, overflow="ellipsis", no_wrap=True)


def _log_line(member: str, text: str) -> Text:
    return Text.assemble((member, hue(member)), (" | ", "dim"), Text.from_ansi(text))


def hue(member: str) -> str:
    """Return the colour of a member, which stays the same for its name."""
    return HUES[sum(member.encode()) % len(HUES)]
