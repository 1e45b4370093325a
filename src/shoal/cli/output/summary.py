"""What a run was, in a few lines: progress, what each change cost, the root cause if it failed, where things are."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from shoal import exit_codes
from shoal.cli.output import table
from shoal.cli.output.lines import SHARES, cost, evaluation, event_files, saved
from shoal.core.exit_causes import TOGETHER_S, MemberFailure, root_cause
from shoal.core.fleet.decide import role_of
from shoal.core.membership.state import EVALUATOR
from shoal.wire.api import RunView, StoryLine

ALL_DONE = "all members are done"
EXIT_CODES = {
    "done": exit_codes.OK,
    "failed": exit_codes.FAILED,
    "stopped": exit_codes.RESUMABLE,
    "resumable": exit_codes.RESUMABLE,
}
CHANGES_SHOWN = 10
VICTIMS_SHOWN = 3
TOLD_WITHIN_S = 1.0
PLANNED = (f"exit code {exit_codes.OK}", f"exit code {exit_codes.RESUMABLE}", "signal 15")
ENTERED = re.compile(r"world (\d+) with \d+ members from step (\d+)")


class WorldChange(msgspec.Struct, frozen=True):
    """One change of the world, and what it cost; a planned one (`formed_s` None) costs no wait."""

    world: int
    step: int | None
    text: str
    formed_s: float | None
    steps_lost: int


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
    losses: int
    joins: int
    changes: tuple[WorldChange, ...]
    checkpoint_step: int | None
    checkpoint_path: str
    directory: str
    cause: str
    victims: tuple[str, ...]
    share_changes: int = 0
    idle_before: float | None = None
    idle_now: float | None = None
    evaluated: str = ""
    export: str = ""
    tensorboard: str = ""
    tensorboard_error: str = ""
    cost: str = ""


def of(view: RunView, story: Sequence[StoryLine], *, abandoned: bool = False) -> Summary:
    """Put the end of a run together from what was seen of it."""
    # What became of an evaluator concerns nobody else.
    story = [line for line in story if role_of(line.member) != EVALUATOR]
    cause, victims = _root_cause(view, story)
    last = story[-1].at if story else view.since
    return Summary(
        run=view.run,
        name=view.name,
        status=view.status,
        reason=view.reason,
        exit_code=exit_code(view, abandoned=abandoned),
        step=max(view.step, view.checkpoint_step or 0),
        total_steps=view.total_steps,
        seconds=max(0.0, (view.ended or last) - view.started),
        loss=view.loss,
        losses=view.losses,
        joins=view.joins,
        changes=changes(story),
        checkpoint_step=view.checkpoint_step,
        checkpoint_path=view.checkpoint_path,
        directory=view.directory,
        cause=cause,
        victims=victims,
        share_changes=sum(line.kind == SHARES for line in story),
        idle_before=view.idle_before,
        idle_now=view.idle_now,
        evaluated=evaluation(view),
        export=view.evaluation.export if view.evaluation is not None else "",
        tensorboard=view.tensorboard,
        tensorboard_error=view.tensorboard_error,
        cost=cost(view.cost) if view.cost is not None else "",
    )


def exit_code(view: RunView, *, abandoned: bool = False) -> int:
    """The exit code of a command that followed this run."""
    if view.exit_code is not None:
        return view.exit_code
    if abandoned:
        return exit_codes.RESUMABLE if view.checkpoint_step is not None else exit_codes.FAILED
    return EXIT_CODES.get(view.status, exit_codes.FAILED)


def changes(story: Sequence[StoryLine]) -> tuple[WorldChange, ...]:
    """The worlds after the first: why each came, how long it took to form, and the steps that had to be done again."""
    found: list[WorldChange] = []
    planned: dict[int, str] = {}
    began: float | None = None
    cause, reached, worlds = "", 0, 0
    for line in story:
        if line.kind in ("WorldBroken", "DissolveWorld", "ProcessExited") and began is None and worlds:
            # Whoever left in order held nobody up.
            began = None if line.kind == "ProcessExited" and line.text.endswith(PLANNED) else line.at
        if line.kind == "DissolveWorld":
            cause = line.reason
        elif line.kind == "WorldBroken":
            reached = max(reached, line.step or 0)
        elif line.kind == "ProposeWorld":
            planned[line.world or 0] = line.reason
        elif line.kind == "FormWorld":
            if worlds:
                lost = max(0, reached - (line.step or 0))
                text = _who_was_lost(story, line.at) or cause
                found.append(WorldChange(line.world or 0, line.step, text, line.at - (began or line.at), lost))
            worlds, began, cause, reached = worlds + 1, None, "", 0
        elif entered := ENTERED.match(line.text):
            number = int(entered[1])
            found.append(WorldChange(number, int(entered[2]), planned.get(number, ""), None, 0))
    return tuple(found)


def _who_was_lost(story: Sequence[StoryLine], at: float) -> str:
    """Those whose processes ended about then; an exit is often told only after the others have gone on."""
    gone = [
        f"{line.member} lost: {line.reason}"
        for line in story
        if line.kind == "ProcessExited" and abs(line.at - at) < TOLD_WITHIN_S and not line.text.endswith(PLANNED)
    ]
    return "; ".join(gone)


def text(facts: Summary) -> str:
    """The summary for people."""
    total = f" of {table.count(facts.total_steps)}" if facts.total_steps else ""
    head = f"{facts.status}: {facts.name} ({facts.run}), {table.count(facts.step)}{total} steps"
    lines = []
    if facts.cause:
        lines.append(f"cause       {facts.cause}")
        lines += [f"            then {victim}" for victim in facts.victims[:VICTIMS_SHOWN]]
        if len(facts.victims) > VICTIMS_SHOWN:
            lines.append(f"            and {len(facts.victims) - VICTIMS_SHOWN} more that followed from it")
    lines.append(
        f"{head} in {table.span(facts.seconds)}" + (f", loss {facts.loss:.4g}" if facts.loss is not None else "")
    )
    if facts.reason and (facts.status != "done" or facts.reason != ALL_DONE):
        lines.append(f"why         {facts.reason}")
    lines.append(f"members     {facts.joins} joined, {facts.losses} lost")
    lines += _changes(facts)
    lines += _shares(facts)
    if facts.cost:
        lines.append(f"cost        {facts.cost}")
    if facts.evaluated:
        lines.append(f"evaluated   {facts.evaluated}")
    if facts.export:
        lines.append(f"best model  {facts.export}")
    if facts.checkpoint_step is not None:
        lines.append(f"checkpoint  {saved(facts.checkpoint_step, facts.checkpoint_path)}")
    if facts.directory:
        lines.append(f"logs        {facts.directory}/logs")
    if facts.tensorboard:
        lines.append(f"tensorboard {event_files(facts.tensorboard, facts.tensorboard_error)}")
    if facts.status in ("stopped", "resumable"):
        more = " --budget MORE" if facts.exit_code == exit_codes.BUDGET_REACHED else ""
        lines.append(f"to go on    shoal resume {facts.run}{more}")
    return "\n".join(lines)


def _changes(facts: Summary) -> list[str]:
    shown = facts.changes[-CHANGES_SHOWN:]
    lines = [f"{_where(change)}{change.text}{_cost(change)}" for change in shown]
    if len(facts.changes) > len(shown):
        lines.insert(0, f"{len(facts.changes) - len(shown)} before these; shoal why {facts.run} tells all")
    return [f"{'changes' if index == 0 else '':<12}{line}" for index, line in enumerate(lines)]


def _shares(facts: Summary) -> list[str]:
    if not facts.share_changes:
        return []
    times = "once" if facts.share_changes == 1 else f"{facts.share_changes} times"
    idle = ""
    if facts.idle_before is not None and facts.idle_now is not None:
        idle = f"; idle {table.percent(facts.idle_now)} of the time, with equal ones {table.percent(facts.idle_before)}"
    return [f"shares      changed {times}{idle}"]


def _where(change: WorldChange) -> str:
    return (
        f"world {change.world}, step {table.count(change.step)}: "
        if change.step is not None
        else f"world {change.world}: "
    )


def _cost(change: WorldChange) -> str:
    if change.formed_s is None:
        return " (planned: nobody waited for it)"
    lost = f"{change.steps_lost} steps lost" if change.steps_lost != 1 else "1 step lost"
    return f" (new world after {table.span(change.formed_s)}, {lost})"


def _root_cause(view: RunView, story: Sequence[StoryLine]) -> tuple[str, tuple[str, ...]]:
    """The failure that explains the others, and those; only for a run that failed."""
    if view.status != "failed":
        return "", ()
    found = root_cause(_failures(story))
    if found is None:
        return view.reason, ()
    first = f"{found.first.member}: {found.first.detail}"
    victims = dict.fromkeys(f"{one.member}: {one.detail}" for one in found.victims)
    return first, tuple(victim for victim in victims if victim != first)


def _failures(story: Sequence[StoryLine]) -> list[MemberFailure]:
    """What members raised, and how processes ended that had not raised before."""
    raised: dict[str, float] = {}
    found = []
    for line in story:
        if line.kind == "ExceptionReported":
            raised[line.member] = line.at
            detail = line.text.removeprefix(f"{line.member} raised ")
            found.append(
                MemberFailure(line.member, line.at, "user", f"{detail} ({line.reason})" if line.reason else detail)
            )
        elif line.kind == "ProcessExited" and line.at - raised.get(line.member, -TOGETHER_S) >= TOGETHER_S:
            cause = "infrastructure" if "signal" in line.text else "user"
            if not line.text.endswith(PLANNED):
                found.append(MemberFailure(line.member, line.at, cause, line.reason))
    return found
