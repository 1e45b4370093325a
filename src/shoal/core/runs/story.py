"""What happened, as sentences: every event and instruction is worth at most one line of the story."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.membership.draft import join_names
from shoal.core.provisioning import events as se
from shoal.core.runs import evaluation
from shoal.core.runs import events as runs_events
from shoal.core.runs.spec import StoryLine

LINES_PER_ENTRY = 100


def tell(seq: int, at: float, run: str, event: Any, asked: Sequence[tuple[str, Any]]) -> list[StoryLine]:
    """The lines that entry `seq` of the journal and what was decided about it are worth."""
    lines: list[StoryLine] = []
    for name, told in _worth_telling(run, event, asked):
        sentence = _SENTENCES.get(type(told))
        found = sentence(told) if sentence is not None else None
        if found is None or len(lines) == LINES_PER_ENTRY:
            continue
        text, reason = found
        number = seq * LINES_PER_ENTRY + len(lines)
        kind, member = _kind(told)
        lines.append(StoryLine(number, at, name, kind, member, _world(told), _step(told), text, reason))
    return lines


def _worth_telling(run: str, event: Any, asked: Sequence[tuple[str, Any]]) -> Sequence[tuple[str, Any]]:
    """What members decided by themselves is told in one line, and not again when they only repeat it."""
    if isinstance(event, ev.AdjustmentReported):
        return [(run, event)] if asked else []
    return [(run, event), *asked]


def _kind(told: Any) -> tuple[str, str]:
    """The kind of a line, and whom it is about: shares and batches are everybody's, whoever told of them."""
    if isinstance(told, ev.AdjustmentReported):
        return f"{told.what.capitalize()}Decided", told.member if told.what == "memory" else ""
    return type(told).__name__, getattr(told, "member", "")


def _world(told: Any) -> int | None:
    world = getattr(told, "world", None)
    number = getattr(world, "number", world)
    return number if isinstance(number, int) else getattr(told, "number", None)


def _step(told: Any) -> int | None:
    step = getattr(told, "step", None)
    return step if step is not None else getattr(getattr(told, "world", None), "step", None)


Sentence = tuple[str, str] | None


def _hello(e: ev.MemberConnected) -> Sentence:
    if e.world is None:
        return f"{e.member} connected from {e.address.host}", ""
    return f"{e.member} found the coordinator again", f"it says that it is in world {e.world} at step {e.step}"


def _ready(e: ev.MemberReady) -> Sentence:
    held = f"it holds the state of step {e.step}" if e.step is not None else "it holds no state yet"
    return f"{e.member} is ready", held


def _broke(e: ev.WorldBroken) -> Sentence:
    who = f", suspects {', '.join(e.suspects)}" if e.suspects else ""
    return f"{e.member} lost world {e.world} at step {e.step}{who}", e.cause


def _decided(e: ev.AdjustmentReported) -> Sentence:
    begins = f"from step {e.step} on" if e.what == "memory" else f"{e.what} from step {e.step} on"
    return f"{begins}: {e.reason}", e.reason


def _created(e: runs_events.RunCreated) -> Sentence:
    low, high = e.spec.members
    return f"run created: {' '.join(e.spec.argv)} with {low}:{high} members", ""


def _raised(e: runs_events.ExceptionReported) -> Sentence:
    places = [line.strip() for line in e.traceback.splitlines() if line.lstrip().startswith("File ")]
    return f"{e.member} raised {e.kind}: {e.text}", places[-1] if places else ""


def _exited(e: fe.ProcessExited) -> Sentence:
    how = f"by signal {e.signal}" if e.signal else f"with exit code {e.exit_code}" if e.exit_code is not None else ""
    return f"the process of {e.member} ended {how}".rstrip(), e.detail or e.cause


def _agent_joined(e: fe.AgentConnected) -> Sentence:
    offer = "as many members as asked" if e.slots is None else f"{e.slots} members"
    return f"agent {e.agent} connected and offers {offer}", ""


def _formed(i: ev.FormWorld) -> Sentence:
    names = join_names(seat.member for seat in i.world.seats)
    return f"world {i.world.number} begins at step {i.world.step} with {names}", i.reason


def _proposed(i: ev.ProposeWorld) -> Sentence:
    if not i.is_new:
        return None
    names = join_names(seat.member for seat in i.world.seats)
    return f"world {i.world.number} is prepared beside world {i.after} with {names}", i.reason


def _placed(i: ev.PublishPlacement) -> Sentence:
    if len(i.to) == 1:
        return f"{i.to[0]} is told of placement {i.placement.number}", i.reason
    held = "; ".join(
        ("the ledger" if part == 0 else f"shard {part}")
        + f" on {h.primary}"
        + (f", backup {h.backup}" if h.backup else "")
        + (f", copied to {h.learner}" if h.learner else "")
        for part, h in enumerate(i.placement.assignments)
    )
    return f"placement {i.placement.number}: {held}", i.reason


def _start(i: fe.StartProcess) -> Sentence:
    return f"{i.member} is started {'again ' if i.restart else ''}on agent {i.agent}", i.reason


_SENTENCES: dict[type, Callable[[Any], Sentence]] = {
    ev.MemberConnected: _hello,
    ev.MemberReady: _ready,
    ev.AdjustmentReported: _decided,
    ev.WorldBroken: _broke,
    ev.MemberDisconnected: lambda e: (f"{e.member} lost its connection to the coordinator", ""),
    ev.MemberDone: lambda e: (f"{e.member} is done at step {e.step}", ""),
    ev.ClaimCompleted: lambda e: (f"{e.member} did {e.name}", "exactly one member does it"),
    ev.CheckpointWritten: lambda e: (f"{e.member} wrote the checkpoint of step {e.step}", e.path),
    ev.FormWorld: _formed,
    ev.ProposeWorld: _proposed,
    ev.DissolveWorld: lambda i: (f"world {i.number} is over", i.reason),
    ev.PartCopied: lambda e: (f"{e.member} has given part {e.part} to {e.to}", ""),
    ev.PartReleased: lambda e: (f"{e.member} rests with part {e.part}, so that another can take over", ""),
    ev.ServerUnreachable: lambda e: (f"{e.member} cannot reach {e.server}", e.cause),
    ev.PublishPlacement: _placed,
    ev.AnnounceTrainerLost: lambda i: (f"the servers no longer wait for {i.member}", i.reason),
    ev.RestoreCheckpoint: lambda i: (f"{i.member} is asked to load the newest checkpoint", i.reason),
    ev.RejectMember: lambda i: (f"{i.member} is refused: {i.what}", i.why),
    ev.EvictMember: lambda i: (f"{i.member} is told that it is out", i.reason),
    ev.StopMembers: lambda i: (f"{join_names(i.to)} told to stop", i.reason),
    ev.AnnounceFinished: lambda i: (f"the training is finished at step {i.step}", ""),
    ev.MembershipNote: lambda i: (i.text, ""),
    evaluation.EvaluationNote: lambda i: (i.text, i.reason),
    evaluation.StopEarly: lambda i: ("the run ends before its last step", i.reason),
    runs_events.RunCreated: _created,
    runs_events.RunResumed: lambda e: (f"run resumed with {e.min_members}:{e.max_members} members", ""),
    runs_events.BudgetSet: lambda e: (f"the run may spend {e.budget:.2f} in all", ""),
    runs_events.UserStopRequested: lambda e: ("the run is asked to stop", e.reason),
    runs_events.ExceptionReported: _raised,
    fe.AgentConnected: _agent_joined,
    fe.AgentDisconnected: lambda e: (f"agent {e.agent} lost its connection", ""),
    fe.AgentNotice: lambda e: (f"the machine of agent {e.agent} goes away within {e.within_s:.0f} s", e.cause),
    fe.ProcessStarted: lambda e: (f"{e.member} runs as process {e.pid}{', warm' if e.warm else ''}", ""),
    fe.ProcessExited: _exited,
    fe.StartProcess: _start,
    fe.StopProcess: lambda i: (f"{i.member} is ended on agent {i.agent}", i.reason),
    fe.MarkTrainingFinished: lambda _: ("only the evaluator is waited for", "nobody trains any more"),
    fe.MarkRunFailed: lambda i: (f"the run failed with exit code {i.exit_code}", i.reason),
    fe.MarkRunEnded: lambda i: (f"the run ended with exit code {i.exit_code}", i.reason),
    fe.FleetNote: lambda i: (i.text, ""),
    se.SubmitAllocation: lambda i: (f"{i.allocation} is asked of pool {i.pool}", i.reason),
    se.CancelAllocation: lambda i: (f"{i.allocation} of pool {i.pool} is let go", i.reason),
    se.ProvisioningNote: lambda i: (i.text, ""),
    se.FailInfeasibleRun: lambda i: (
        "the run cannot begin",
        "; ".join(f"pool {one.pool}: {one.why}" for one in i.problems),
    ),
    se.StopRunOverBudget: lambda i: ("the run is stopped after a checkpoint", i.reason),
}
