"""Summary of a run in a few lines: progress, the cost of each change, the root cause of a failure, its files.

The coordinator does not count what a change of the world cost; it is computed here from the story. A change begins with
the first `WorldBroken`, `DissolveWorld` or unplanned `ProcessExited` and ends with `FormWorld`; the time in between is
how long training stood still. If the new world begins at an earlier step than the old one had reached, the steps
between them are lost: the survivors had no state of them. The run then repeats them, unless it ends before. A planned
change (`ProposeWorld`, then the note that its members crossed over) costs no time and no step.

What the old world had reached is known from the members that saw it break, from the last progress that the follower saw
before, or, if training starts over, from the coordinator's note. If all members died at once, the newest of these may
be older than their last step; the summary then says "at least".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal import exit_codes
from shoal.cli.output import table
from shoal.cli.output.lines import SHARES, checkpoint, cost, evaluation, event_files, resume_advice
from shoal.cli.output.tracebacks import FRAME, user_frame
from shoal.core.exit_causes import TOGETHER_S, MemberFailure, root_cause
from shoal.core.fleet.decide import role_of
from shoal.core.membership.state import EVALUATOR
from shoal.core.nouns import counted, plural
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
REPORTED_WITHIN_S = 1.0
PLANNED_EXITS = (f"exit code {exit_codes.OK}", f"exit code {exit_codes.RESUMABLE}", "signal 15")
STOPPED_BY_FAILURE = "the run failed: "
# A silent or stuck member stops all others long before it is given up.
STANDSTILL = re.compile(r"(?:lease expired after|stuck in .+ for) ([\d.]+) s\b")


class WorldChange(msgspec.Struct, frozen=True):
    """One change of the world, and what it cost; a planned one (`formed_s` None) interrupts no step.

    `steps_lost` are committed steps whose state no surviving member had; `steps_repeated` is how many of them the run
    has done again since. After the loss of all members (`restored`) both are the least that is known, since the last
    steps of a killed member may never have been reported.
    """

    world: int
    step: int | None
    text: str
    formed_s: float | None
    steps_lost: int
    steps_repeated: int = 0
    restored: bool = False


class Summary(msgspec.Struct, frozen=True):
    """The facts that the summary of a run shows; `logs` is a path, or what to do instead of looking there.

    `cause` is the failure that explains the others: `others` members had the same, `victims` failed as a consequence.
    `frame` is where in the user's code it was raised, with its `traceback`.
    """

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
    logs: str
    resume: str
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
    warnings: tuple[str, ...] = ()
    others: int = 0
    frame: str = ""
    traceback: str = ""
    advice: str = ""


def summarise(
    view: RunView,
    story: Sequence[StoryLine],
    *,
    reached: Mapping[int, int] = {},
    abandoned: bool = False,
    target_options: str = "",
    traceback_of: Callable[[str], str] = lambda _member: "",
) -> Summary:
    """Return the summary of a run from its last view and its story.

    `reached` is the step that the run had reached when each world formed, as far as that was seen; `target_options`
    address the run's coordinator in the commands that the summary advises. `traceback_of` returns the traceback that a
    member has printed.
    """
    # The end of an evaluator does not affect the training.
    story = [line for line in story if role_of(line.member) != EVALUATOR]
    blame = _root_cause(view, story)
    traceback = traceback_of(blame.member) if blame.member else ""
    if blame.error not in traceback:
        traceback = ""  # of an error that the script has handled itself
    last = story[-1].at if story else view.since
    step = max(view.step, view.checkpoint_step or 0)
    more = " --budget AMOUNT" if view.exit_code == exit_codes.BUDGET_REACHED else ""
    can_resume = view.status in ("stopped", "resumable")
    return Summary(
        run=view.run,
        name=view.name,
        status=view.status,
        reason=view.reason,
        exit_code=exit_code(view, abandoned=abandoned),
        step=step,
        total_steps=view.total_steps,
        seconds=max(0.0, (view.ended or last) - view.started),
        loss=view.loss,
        losses=view.losses,
        joins=view.joins,
        changes=changes(story, reached, step),
        checkpoint_step=view.checkpoint_step,
        checkpoint_path=view.checkpoint_path,
        directory=view.directory,
        logs=log_place(view, target_options),
        resume=resume_advice(view.run, step, view.checkpoint_step, target_options + more) if can_resume else "",
        cause=blame.cause,
        victims=blame.victims,
        others=blame.others,
        frame=user_frame(traceback),
        traceback=traceback,
        advice=_advice(blame.cause, view.argv),
        share_changes=sum(line.kind == SHARES for line in story),
        idle_before=view.idle_before,
        idle_now=view.idle_now,
        evaluated=evaluation(view),
        export=view.evaluation.export if view.evaluation is not None else "",
        tensorboard=view.tensorboard,
        tensorboard_error=view.tensorboard_error,
        cost=cost(view.cost) if view.cost is not None else "",
        warnings=tuple(adjustment.reason for adjustment in view.decided if adjustment.what == "loss"),
    )


def exit_code(view: RunView, *, abandoned: bool = False) -> int:
    """Return the exit code of a command that followed this run."""
    if view.exit_code is not None:
        return view.exit_code
    if abandoned:
        return exit_codes.RESUMABLE if view.checkpoint_step is not None else exit_codes.FAILED
    return EXIT_CODES.get(view.status, exit_codes.FAILED)


def log_place(view: RunView, target_options: str = "") -> str:
    """Return the directory of the members' logs if it exists here, else where their output is instead."""
    logs = Path(view.directory) / "logs"
    if view.directory and logs.is_dir():
        return str(logs)
    # The directory of a run appears with its first file, that of all runs with the coordinator.
    if view.directory and logs.parent.parent.is_dir():
        return "none: no member printed anything"
    return f"on the coordinator's machine; shoal logs {view.run}{target_options}"


def changes(story: Sequence[StoryLine], reached: Mapping[int, int] = {}, last_step: int = 0) -> tuple[WorldChange, ...]:
    """Return every world after the first: its cause, the time it took to form, and the steps lost and repeated.

    `last_step` is the step that the run has reached in the end.
    """
    result: list[WorldChange] = []
    planned: dict[int, str] = {}
    broken_at: float | None = None
    cause, broken_step, worlds, restored = "", 0, 0, False
    for line in story:
        if line.kind in ("WorldBroken", "DissolveWorld", "ProcessExited") and broken_at is None and worlds:
            # A member that left cleanly interrupted no step.
            is_planned = line.kind == "ProcessExited" and line.text.endswith(PLANNED_EXITS)
            broken_at = None if is_planned else line.at
        if line.kind == "DissolveWorld":
            cause = line.reason
            if broken_at is not None and line.at - broken_at > REPORTED_WITHIN_S:
                broken_at = line.at  # until now it was a late report about the world before
            if broken_at is not None and (standstill := STANDSTILL.search(cause)):
                broken_at -= float(standstill[1])
        elif line.kind == "WorldBroken":
            broken_step = max(broken_step, line.step or 0)
        elif line.kind == "ProposeWorld":
            planned[line.world or 0] = line.reason
        elif line.kind == "FormWorld":
            if worlds:
                number, step = line.world or 0, line.step or 0
                lost = max(0, broken_step - step, reached.get(number, 0) - step)
                text = _lost_members(story, line.at) or cause
                formed_s = line.at - (broken_at or line.at)
                result.append(WorldChange(number, line.step, text, formed_s, lost, restored=restored))
            worlds, broken_at, cause, broken_step, restored = worlds + 1, None, "", 0, False
        elif line.kind == "WorldEntered":
            number = line.world or 0
            result.append(WorldChange(number, line.step, planned.get(number, ""), None, 0))
        elif line.kind == "TrainingStartedOver":
            broken_step = max(broken_step, line.step or 0)
        elif line.kind == "CheckpointRestored":
            restored = True
    return tuple(_with_repeated(change, result[index + 1 :], last_step) for index, change in enumerate(result))


def _with_repeated(change: WorldChange, later: Sequence[WorldChange], last_step: int) -> WorldChange:
    """Return a change with the number of its lost steps that the run has done again, before or after later changes."""
    start = change.step or 0
    furthest = max([last_step, *((other.step or 0) + other.steps_lost for other in later)])
    return msgspec.structs.replace(change, steps_repeated=min(change.steps_lost, max(0, furthest - start)))


def _lost_members(story: Sequence[StoryLine], at: float) -> str:
    """Return the members whose processes ended about then; an exit is often reported after the new world has formed."""
    lost = [
        f"{line.member} lost: {line.reason}"
        for line in story
        if line.kind == "ProcessExited"
        and abs(line.at - at) < REPORTED_WITHIN_S
        and not line.text.endswith(PLANNED_EXITS)
    ]
    return "; ".join(lost)


def text(facts: Summary) -> str:
    """Return the summary as text."""
    total = f" of {table.count(facts.total_steps)}" if facts.total_steps else ""
    steps = plural(facts.total_steps or facts.step, "step")
    head = f"{facts.status}: {facts.name} ({facts.run}), {table.count(facts.step)}{total} {steps}"
    lines = []
    if facts.cause:
        lines += _cause_lines(facts)
    lines.append(
        f"{head} in {table.span(facts.seconds)}" + (f", loss {facts.loss:.4g}" if facts.loss is not None else "")
    )
    lines += [f"warning     {warning}" for warning in facts.warnings]
    if facts.reason and (facts.status != "done" or facts.reason != ALL_DONE):
        lines.append(f"why         {_reason_beside_cause(facts)}")
    if facts.joins or facts.losses or not facts.cause:
        lines.append(f"members     {facts.joins} joined, {facts.losses} lost")
    lines += _change_lines(facts)
    lines += _share_lines(facts)
    if facts.cost:
        lines.append(f"cost        {facts.cost}")
    if facts.evaluated:
        lines.append(f"evaluated   {facts.evaluated}")
    if facts.export:
        lines.append(f"best model  {facts.export}")
    if facts.checkpoint_step is not None:
        lines.append(f"checkpoint  {checkpoint(facts.checkpoint_step, facts.checkpoint_path)}")
    lines.append(f"logs        {facts.logs}")
    if facts.tensorboard and (facts.step or not facts.cause):
        lines.append(f"tensorboard {event_files(facts.tensorboard, facts.tensorboard_error)}")
    if facts.resume:
        lines.append(f"continue    {facts.resume}")
    return "\n".join(lines)


def _cause_lines(facts: Summary) -> list[str]:
    others = f" (and {facts.others} other {plural(facts.others, 'member')})" if facts.others else ""
    lines = [f"cause       {facts.cause}{others}"]
    lines += [f"            then {victim}" for victim in facts.victims[:VICTIMS_SHOWN]]
    if len(facts.victims) > VICTIMS_SHOWN:
        lines.append(f"            and {len(facts.victims) - VICTIMS_SHOWN} more as a consequence")
    if facts.frame and len(FRAME.findall(facts.traceback)) > 1:
        lines.append(f"at          {facts.frame}")
    if facts.advice:
        lines.append(f"do          {facts.advice}")
    return lines + [f"  {line}" for line in facts.traceback.splitlines()]


def _reason_beside_cause(facts: Summary) -> str:
    """Return the reason without the error that the cause shows already."""
    _, _, not_restarted = facts.reason.partition(" (not restarted: ")
    return f"not restarted: {not_restarted.removesuffix(')')}" if facts.cause and not_restarted else facts.reason


def _change_lines(facts: Summary) -> list[str]:
    shown = facts.changes[-CHANGES_SHOWN:]
    lines = [f"{_place(change)}{change.text}{_cost(change)}" for change in shown]
    if len(facts.changes) > len(shown):
        lines.insert(0, f"{len(facts.changes) - len(shown)} earlier ones; shoal why {facts.run} shows all")
    return [f"{'changes' if index == 0 else '':<12}{line}" for index, line in enumerate(lines)]


def _share_lines(facts: Summary) -> list[str]:
    if not facts.share_changes:
        return []
    times = "once" if facts.share_changes == 1 else f"{facts.share_changes} times"
    idle = ""
    if facts.idle_before is not None and facts.idle_now is not None:
        idle = (
            f"; idle {table.percent(facts.idle_now)} of the time, {table.percent(facts.idle_before)} with equal shares"
        )
    return [f"shares      changed {times}{idle}"]


def _place(change: WorldChange) -> str:
    return (
        f"world {change.world}, step {table.count(change.step)}: "
        if change.step is not None
        else f"world {change.world}: "
    )


def _cost(change: WorldChange) -> str:
    if change.formed_s is None:
        return " (planned: no step was interrupted)"
    lost = f"{counted(change.steps_lost, 'step')} lost, {change.steps_repeated} repeated"
    if change.restored:
        lost = (
            f"restored a checkpoint: at least {lost}"
            if change.steps_lost
            else "restored a checkpoint: later steps lost"
        )
    return f" (new world after {table.span(change.formed_s)}; {lost})"


class _Blame(NamedTuple):
    """The failure that explains the others: its member, its error, how many others had the same, its consequences."""

    cause: str = ""
    member: str = ""
    error: str = ""
    others: int = 0
    victims: tuple[str, ...] = ()


def _root_cause(view: RunView, story: Sequence[StoryLine]) -> _Blame:
    """Return the failure that explains the others; empty unless the run failed."""
    if view.status != "failed":
        return _Blame()
    cause = root_cause(_failures(story))
    if cause is None:
        return _Blame(view.reason)
    member, detail = cause.first.member, cause.first.detail
    others = {victim.member for victim in cause.victims if victim.detail == detail} - {member}
    victims = dict.fromkeys(f"{v.member}: {v.detail}" for v in cause.victims if v.detail != detail)
    error = detail.partition("\n")[0].partition(" (File ")[0]
    return _Blame(f"{member}: {detail}", member, error, len(others), tuple(victims))


def _advice(cause: str, argv: Sequence[str]) -> str:
    """Return what to do about a cause that users meet often, "" for any other."""
    if "EOF when reading a line" in cause or "BdbQuit" in cause:
        script = " ".join(argv[:1]) or "SCRIPT.py"
        return f"members have no terminal for breakpoint() and input(); run the script alone: python {script}"
    return ""


def _failures(story: Sequence[StoryLine]) -> list[MemberFailure]:
    """Return the exceptions of members, and the exits of processes that had not raised one before."""
    raised_at: dict[str, float] = {}
    failures = []
    for line in story:
        if line.kind == "ExceptionReported":
            raised_at[line.member] = line.at
            detail = line.text.removeprefix(f"{line.member} raised ")
            detail = f"{detail} ({line.reason})" if line.reason else detail
            failures.append(MemberFailure(line.member, line.at, "user", detail))
        elif line.reason.startswith(STOPPED_BY_FAILURE):
            continue
        elif line.kind == "ProcessExited" and line.at - raised_at.get(line.member, -TOGETHER_S) >= TOGETHER_S:
            cause = "infrastructure" if "signal" in line.text else "user"
            if not line.text.endswith(PLANNED_EXITS):
                failures.append(MemberFailure(line.member, line.at, cause, line.reason))
    return failures
