"""The story of a run: what happened, as sentences with reasons, for `shoal why`.

Every event and every instruction is worth at most one line. A sentence has its subject first and is in the past tense;
where the coordinator itself acted, it begins with the verb. The reason adds a fact, and comes from the state machine
that decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.membership.draft import join_names
from shoal.core.membership.state import DONE
from shoal.core.nouns import bounded, counted
from shoal.core.provisioning import events as pe
from shoal.core.runs import evaluation
from shoal.core.runs import events as run_events
from shoal.core.runs.spec import StoryLine
from shoal.core.runs.state import RunState

LINES_PER_ENTRY = 100
# So many worlds in a row that broke before their first step are told one by one.
TOLD_FAILURES = 3

Sentence = tuple[str, str] | None


def tell(
    seq: int, at: float, run: str, event: Any, instructions: Sequence[tuple[str, Any]], state: RunState | None = None
) -> list[StoryLine]:
    """Return the story lines of journal entry `seq` and its instructions; `state` is the run's after the event."""
    lines: list[StoryLine] = []
    for name, subject in _worth_telling(run, event, instructions, state):
        describe = _SENTENCES.get(type(subject))
        sentence = describe(subject) if describe is not None else None
        if sentence is None or len(lines) == LINES_PER_ENTRY:
            continue
        number = first_line(seq) + len(lines)
        kind, member = _kind_and_member(subject)
        lines.append(StoryLine(number, at, name, kind, member, _world(subject), _step(subject), *sentence))
    return lines


def first_line(seq: int) -> int:
    """Return the number of the first story line of journal entry `seq`."""
    return seq * LINES_PER_ENTRY


def lost_history(seq: int, at: float) -> StoryLine:
    """Return the line that stands for all lines up to journal entry `seq`, which are gone."""
    text, reason = "the story before this is gone", "views.sqlite was deleted or damaged after a snapshot"
    return StoryLine(first_line(seq), at, "", "HistoryLost", "", None, None, text, reason)


def _worth_telling(
    run: str, event: Any, instructions: Sequence[tuple[str, Any]], state: RunState | None
) -> Sequence[tuple[str, Any]]:
    """Return what is news of an event and its instructions, each with its run."""
    if isinstance(event, ev.AdjustmentReported):
        # Every member reports the same adjustment; only the first report leads to an instruction.
        return [(run, event)] if instructions else []
    if state is not None and _is_repeated_failure(state):
        # One line for each doubling of the count: it is in the reason of the world that is formed next.
        repeated = (ev.WorldBroken, ev.DissolveWorld, ev.FormWorld, ev.MembershipNote)
        return [(name, subject) for name, subject in [(run, event), *instructions] if not isinstance(subject, repeated)]
    if isinstance(event, ev.MemberDisconnected) and state is not None and _has_finished(state, event.member):
        return instructions
    return [(run, event), *instructions]


def _is_repeated_failure(run: RunState) -> bool:
    """Return whether worlds break before their first step, and their number is not worth a line."""
    failed = run.membership.failed_worlds
    return failed > TOLD_FAILURES and failed & (failed - 1) != 0


def _has_finished(run: RunState, name: str) -> bool:
    """Return whether a member closed its connection because it was done."""
    member = run.membership.members.get(name)
    return run.membership.finished or (member is not None and member.status == DONE)


def _kind_and_member(subject: Any) -> tuple[str, str]:
    """Return the kind of a line and the member it is about; shares and batches are about all members."""
    if isinstance(subject, ev.AdjustmentReported):
        return f"{subject.what.capitalize()}Decided", subject.member if subject.what == "memory" else ""
    if isinstance(subject, (ev.MembershipNote, fe.FleetNote)) and subject.kind:
        return subject.kind, subject.member
    return type(subject).__name__, getattr(subject, "member", "")


def _world(subject: Any) -> int | None:
    world = getattr(subject, "world", None)
    number = getattr(world, "number", world)
    return number if isinstance(number, int) else getattr(subject, "number", None)


def _step(subject: Any) -> int | None:
    step = getattr(subject, "step", None)
    return step if step is not None else getattr(getattr(subject, "world", None), "step", None)


def _connected(e: ev.MemberConnected) -> Sentence:
    if e.world is None:
        return f"{e.member} connected from {e.address.host}", ""
    return f"{e.member} reconnected to the coordinator", f"in world {e.world} at step {e.step}"


def _ready(e: ev.MemberReady) -> Sentence:
    return f"{e.member} became ready", "holds no state yet" if e.step is None else f"holds the state of step {e.step}"


def _broken(e: ev.WorldBroken) -> Sentence:
    suspects = f", suspecting {', '.join(e.suspects)}" if e.suspects else ""
    return f"{e.member} lost world {e.world} at step {e.step}{suspects}", e.cause


def _done(e: ev.MemberDone) -> Sentence:
    if e.early:
        return f"script of {e.member} left its training loop at step {e.step}", ""
    return f"{e.member} finished at step {e.step}", ""


def _adjusted(e: ev.AdjustmentReported) -> Sentence:
    start = f"from step {e.step} on" if e.what == "memory" else f"{e.what} from step {e.step} on"
    return f"{start}: {e.reason}", e.reason


def _created(e: run_events.RunCreated) -> Sentence:
    low, high = e.spec.members
    return f"run created: {' '.join(e.spec.argv)} with {bounded(low, high, 'member')}", ""


def _raised(e: run_events.ExceptionReported) -> Sentence:
    frames = [line.strip() for line in e.traceback.splitlines() if line.lstrip().startswith("File ")]
    return f"{e.member} raised {e.kind}: {e.text}", frames[-1] if frames else ""


def _exited(e: fe.ProcessExited) -> Sentence:
    how = f" by signal {e.signal}" if e.signal else f" with exit code {e.exit_code}" if e.exit_code is not None else ""
    return f"process of {e.member} ended{how}", e.detail or e.cause


def _agent_connected(e: fe.AgentConnected) -> Sentence:
    return f"agent {e.agent} connected" + ("" if e.slots is None else f" with {counted(e.slots, 'slot')}"), ""


def _formed(i: ev.FormWorld) -> Sentence:
    names = join_names(seat.member for seat in i.world.seats)
    return f"world {i.world.number} started at step {i.world.step} with {names}", i.reason


def _proposed(i: ev.ProposeWorld) -> Sentence:
    if not i.is_new:
        return None
    names = join_names(seat.member for seat in i.world.seats)
    return f"prepared world {i.world.number} beside world {i.after} with {names}", i.reason


def _placed(i: ev.PublishPlacement) -> Sentence:
    if len(i.to) == 1:
        return f"sent placement {i.placement.number} to {i.to[0]}", i.reason
    parts = "; ".join(
        f"{_part(part)} on {assignment.primary}"
        + (f", backup {assignment.backup}" if assignment.backup else "")
        + (f", copied to {assignment.learner}" if assignment.learner else "")
        for part, assignment in enumerate(i.placement.assignments)
    )
    return f"placement {i.placement.number}: {parts}", i.reason


def _part(part: int) -> str:
    return "the ledger" if part == 0 else f"shard {part}"


_SENTENCES: dict[type, Callable[[Any], Sentence]] = {
    # Events of members.
    ev.MemberConnected: _connected,
    ev.MemberReady: _ready,
    ev.AdjustmentReported: _adjusted,
    ev.WorldBroken: _broken,
    ev.MemberDisconnected: lambda e: (f"{e.member} lost its connection to the coordinator", ""),
    ev.MemberDone: _done,
    ev.ClaimCompleted: lambda e: (f"{e.member} saved {e.name}", "claim granted to one member"),
    ev.CheckpointWritten: lambda e: (f"{e.member} wrote the checkpoint of step {e.step}", e.path),
    ev.PartCopied: lambda e: (f"{e.member} copied {_part(e.part)} to {e.to}", ""),
    ev.PartReleased: lambda e: (f"{e.member} released {_part(e.part)} to its backup", ""),
    ev.ServerUnreachable: lambda e: (f"{e.member} could not reach {e.server}", e.cause),
    # Decisions about membership.
    ev.FormWorld: _formed,
    ev.ProposeWorld: _proposed,
    ev.DissolveWorld: lambda i: (f"world {i.number} ended", i.reason),
    ev.PublishPlacement: _placed,
    ev.AnnounceTrainerLost: lambda i: (f"servers stopped waiting for {i.member}", i.reason),
    ev.RestoreCheckpoint: lambda i: (f"told {i.member} to load the newest checkpoint", i.reason),
    ev.RejectMember: lambda i: (f"rejected {i.member}: {i.what}", i.why),
    ev.EvictMember: lambda i: (f"evicted {i.member}", i.reason),
    ev.StopMembers: lambda i: (f"told {join_names(i.to)} to stop", i.reason),
    ev.EndTraining: lambda i: (f"told {join_names(i.to)} that training ends at step {i.step}", i.reason),
    ev.AnnounceFinished: lambda i: (f"training finished at step {i.step}", ""),
    ev.MembershipNote: lambda i: (i.text, ""),
    # Evaluation.
    evaluation.EvaluationNote: lambda i: (i.text, i.reason),
    evaluation.StopEarly: lambda i: ("stopped the run before its last step", i.reason),
    # The run as a whole.
    run_events.RunCreated: _created,
    run_events.RunResumed: lambda e: (f"run resumed with {bounded(e.min_members, e.max_members, 'member')}", ""),
    run_events.BudgetSet: lambda e: (f"budget set to {e.budget:.2f}", ""),
    run_events.UserStopRequested: lambda e: ("run was asked to stop", e.reason),
    run_events.ExceptionReported: _raised,
    run_events.EventSkipped: lambda e: ("an unreadable event of the journal was skipped on request", e.why),
    # Agents and processes.
    fe.AgentConnected: _agent_connected,
    fe.AgentDisconnected: lambda e: (f"agent {e.agent} lost its connection", ""),
    fe.AgentNotice: lambda e: (f"agent {e.agent}: machine shuts down in {e.within_s:.0f} s", e.cause),
    fe.ProcessStarted: lambda e: (f"{e.member} runs as process {e.pid}{', warm' if e.warm else ''}", ""),
    fe.ProcessExited: _exited,
    fe.StartProcess: lambda i: (f"{'restarted' if i.restart else 'started'} {i.member} on agent {i.agent}", i.reason),
    fe.StopProcess: lambda i: (f"stopped {i.member} on agent {i.agent}", i.reason),
    fe.MarkTrainingFinished: lambda _: ("training finished; waiting for the evaluator", ""),
    fe.MarkRunFailed: lambda i: (f"run failed with exit code {i.exit_code}", i.reason),
    fe.MarkRunEnded: lambda i: (f"run ended with exit code {i.exit_code}", i.reason),
    fe.FleetNote: lambda i: (i.text, ""),
    # Machines.
    pe.SubmitAllocation: lambda i: (f"requested {i.allocation} from pool {i.pool}", i.reason),
    pe.CancelAllocation: lambda i: (f"released {i.allocation} of pool {i.pool}", i.reason),
    pe.ProvisioningNote: lambda i: (i.text, ""),
    pe.FailInfeasibleRun: lambda i: (
        "run could not start",
        "; ".join(f"pool {problem.pool}: {problem.why}" for problem in i.problems),
    ),
    pe.StopRunOverBudget: lambda i: ("stopped the run after a checkpoint", i.reason),
}
