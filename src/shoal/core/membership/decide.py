"""Membership of a run: which members train together, and what happens when one joins, leaves, hangs or dies.

Theory of operation
===================

The members of a run train in lockstep: every step is one all-reduce of all members. So at any time there is one fixed,
numbered group of them, the *world*, and the question of this module is how to get from one world to the next without
losing a step. `decide(state, event, now)` answers it. It is pure: the coordinator journals each event and then carries
out the returned instructions, so replaying the journal gives the same state. `leases.due` turns expired timers into
events.

A member's status::

    STARTING ──ready──▶ WAITING ──world formed or entered──▶ TRAINING ──last step──▶ DONE
                          ▲  ▲                                 │  │
                          │  └────left out of a new world──────┘  │
                          └──answered── REGROUPING ◀──dissolved───┘        (lost or left: forgotten, in any status)

The world changes in one of two ways.

**Unplanned.** A member is lost, or reports that its exchange broke. The world is *dissolved*: its members are told so,
and are REGROUPING until each has answered which step it holds the state of. When all have answered, the next world is
formed. Those with the newest step are the sources; the others receive the state from them. If any member committed the
step in which the world broke, that step is kept; otherwise the next world computes it again. No other step is repeated.

**Planned.** A member is ready to join, or has notice and must leave. The next world is *proposed* beside the live one.
Its members connect in the background and say so in their step reports. Every report reaches every member in the same
step, so all see at the same boundary that the proposal is complete, and cross over there without the coordinator. The
first `WorldEntered` tells it. There is one proposal at a time.

**Two worlds are never live.** A world is formed only when no member of the previous one can still train in it: each has
answered, has left, or was lost. A lost member cannot go on by mistake, because the exchange needs all ranks and the
others have left it. A proposal becomes live only by all members crossing from the live world, and dissolving the live
world also ends the proposal. Numbers only grow, and a member ignores every world older than its own.

**The state is never lost while a member holds it.** A member that holds the newest state and has notice stays in the
next world until another has received it. If no holder is left, one member restores the newest checkpoint.

Failure cases:

- *A message is lost* because a connection broke: on reconnecting, a member says where it is (`MemberConnected`), and is
  told again what it missed: the live world, the proposal, the end of its world, a stop.
- *A member cannot reach a peer.* Its report suspects that peer. If the world made no progress, the suspect collects
  failures and is quarantined, longer each time, so that the others can train. A member that is both suspected and
  disconnected is lost at once, before its lease expires.
- *A proposal cannot be connected.* It is dropped, and the joiners that were suspected are quarantined.
- *Worlds break before their first step,* one after another. The next one waits, each time longer.
- *A script leaves its loop* before the last step (`break`, `return`, exit with code 0). The training ends there for all
  (`EndTraining`): members at that step are done; one that is behind, because the world broke in that very step, repeats
  it, alone if need be and with fewer than the minimum; one without the state is told that the run has finished. A
  script that fails with an error ends nothing: its member is lost, and the others continue.
- *All members have notice.* They train until the last moment that leaves time for a checkpoint, in case replacements
  join (`replaces_members`), and then the run stops, resumable.
- *The coordinator restarts.* It replays the journal; all leases restart. Members have trained on meanwhile.
- *Another model.* Before the first step the fingerprint of most members is that of the run; others are rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.core.membership import events as ev
from shoal.core.membership.draft import MembershipDraft, join_names
from shoal.core.membership.leases import RETURN_S, due
from shoal.core.membership.state import (
    DONE,
    REGROUPING,
    STARTING,
    TRAINING,
    WAITING,
    ClaimState,
    LastHeartbeat,
    MembershipSettings,
    MembershipState,
    MemberState,
)
from shoal.core.nouns import bounded, counted
from shoal.core.world import World

# The part of a notice that is kept for a checkpoint in case no replacement joins: at least so many seconds.
CHECKPOINT_S, CHECKPOINT_PART = 5.0, 0.25
# A script that saves in every epoch makes a claim each time; old ones are not asked for again.
KEPT_CLAIMS = 1000
NOT_A_MEMBER = "it is no longer a member of this run"

__all__ = [
    "DONE",
    "REGROUPING",
    "STARTING",
    "TRAINING",
    "WAITING",
    "LastHeartbeat",
    "MemberState",
    "MembershipSettings",
    "MembershipState",
    "decide",
    "due",
]


def decide(state: MembershipState, event: ev.Event, now: float) -> tuple[MembershipState, tuple[ev.Instruction, ...]]:
    """Return the next state and the instructions that follow from an event."""
    draft = MembershipDraft(state, now)
    handle(draft, event)
    draft.advance()
    return draft.result()


def handle(draft: MembershipDraft, event: ev.Event) -> None:
    """Record an event in the draft; the caller decides what follows from it."""
    if not is_outsider(draft, event):
        _HANDLERS[type(event)](draft, event)


def is_outsider(draft: MembershipDraft, event: ev.Event) -> bool:
    """Return whether a member reports on the training of others although it never built its model: that is void."""
    if not isinstance(event, _ON_TRAINING):
        return False
    member, state = draft.members.get(event.member), draft.state
    others_train = state.world is not None or state.placement is not None
    return member is not None and member.status == STARTING and others_train


def _on_connected(draft: MembershipDraft, event: ev.MemberConnected) -> None:
    member = draft.members.get(event.member)
    if member is not None and member.incarnation != event.incarnation:
        if member.connected:
            draft.instruct(
                ev.RejectMember(
                    event.member,
                    event.incarnation,
                    "S205",
                    f"a member named {event.member} is already in this run",
                    why="its connection is open and its lease is fresh",
                    do="give this member another name, or wait until the other one has left",
                )
            )
            return
        draft.lose(event.member, "another process connected under its name")
        member = None
    if member is None:
        _add_member(draft, event)
        return
    draft.update(event.member, connected=True, disconnected_since=None, suspected=False, address=event.address)
    if draft.state.restoring == event.member:
        draft.set(restoring="")  # the instruction may not have reached it
    _reconcile(draft, member, event)
    draft.remind(member)


def _add_member(draft: MembershipDraft, event: ev.MemberConnected) -> None:
    forgotten = tuple(name for name in draft.state.lost_from_world if name != event.member)
    draft.set(order=draft.state.order + 1, lost_from_world=forgotten)
    draft.members[event.member] = MemberState(
        name=event.member,
        incarnation=event.incarnation,
        address=event.address,
        status=STARTING,
        order=draft.state.order,
        since=draft.now,
        step=event.step,
        stale=event.step is not None,
        role=event.role,
    )
    if event.done and event.step is not None:
        # It was taken for lost, but has done the last step; or it left the loop early, which ends nothing for others.
        draft.update(event.member, status=DONE)
        if not event.early:
            draft.set(step=max(draft.state.step, event.step), done_at=event.step)
    elif event.world is not None:
        draft.instruct(ev.EvictMember(event.member, NOT_A_MEMBER))
    draft.remind(draft.members[event.member])


def _reconcile(draft: MembershipDraft, member: MemberState, event: ev.MemberConnected) -> None:
    """Bring the state and a reconnected member together: believe what it did, repeat what it missed."""
    if event.done and event.step is not None:
        _on_done(draft, ev.MemberDone(event.member, event.step, event.early))
    elif member.status == STARTING and event.world is not None:
        draft.instruct(ev.EvictMember(event.member, NOT_A_MEMBER))
    elif event.broken and event.world is not None:
        entered = draft.proposed(event.world)
        if entered is not None and event.step is not None:
            draft.enter(entered, event.step)
        _on_broken(draft, ev.WorldBroken(event.member, event.world, event.step))
        _repeat_world(draft, event)
    elif (entered := draft.proposed(event.world)) is not None and event.step is not None:
        draft.enter(entered, event.step)
    elif draft.state.world is not None and _has_moved_on(draft.state.world, event.member, event.world or 0):
        _on_entered(draft, ev.WorldEntered(event.member, event.world or 0, event.step or 0))
    elif _repeat_world(draft, event):
        draft.repeat_proposal([event.member])
    elif member.status == REGROUPING:
        reason = "the world was dissolved while it was disconnected"
        draft.instruct(ev.DissolveWorld(draft.state.number, (event.member,), reason))
    elif member.status == WAITING and event.world is not None:
        draft.instruct(ev.DissolveWorld(event.world, (event.member,), f"world {event.world} has ended"))
    else:
        draft.repeat_proposal([event.member])


def _has_moved_on(world: World, member: str, number: int) -> bool:
    """Return whether a member of this world is in a later one that no other member has reported."""
    return number > world.number and world.rank_of(member) is not None


def _repeat_world(draft: MembershipDraft, event: ev.MemberConnected) -> bool:
    """Announce the live world again to a member that has a seat in it and is not there; return whether it was so.

    A world that a member has left meanwhile, as all do after a stop, can no longer be entered: it is dissolved.
    """
    world = draft.state.world
    if world is None or world.rank_of(event.member) is None or event.world == world.number:
        return False
    gone = [seat.member for seat in world.seats if seat.member not in draft.members]
    if gone:
        draft.dissolve(f"{event.member} is not in world {world.number}, and {join_names(gone)} has left it")
    else:
        draft.instruct(ev.FormWorld(world, (event.member,), "it missed the formation of this world"))
    return True


def _on_ready(draft: MembershipDraft, event: ev.MemberReady) -> None:
    member = draft.members.get(event.member)
    if member is None or member.status in (TRAINING, DONE):
        return
    draft.update(member.name, fingerprint=event.fingerprint, speed=event.speed)
    if draft.state.fingerprint not in ("", event.fingerprint):
        draft.reject_model(member.name)
        return
    # A late answer, after a world was formed without it, is only a state that may be old.
    answered = event.restored and draft.state.restoring == member.name
    if answered:
        _on_restored(draft, event)
    stale = (member.stale or event.restored) and not answered
    draft.update(member.name, status=WAITING, step=event.step, stale=stale and event.step is not None)
    if not draft.state.started and draft.state.regroup_until is not None:
        draft.set(regroup_until=draft.now + draft.state.settings.regroup_s)


def _on_restored(draft: MembershipDraft, event: ev.MemberReady) -> None:
    draft.set(restoring="")
    if event.step is None:
        note = f"no checkpoint exists: training starts over and repeats {counted(draft.state.step, 'step')}"
        draft.instruct(ev.MembershipNote(note, kind="TrainingStartedOver", step=draft.state.step))
        draft.set(started=False, step=0)
    else:
        note = f"{event.member} restored the checkpoint of step {event.step}"
        draft.instruct(ev.MembershipNote(note, kind="CheckpointRestored", step=event.step))
    if event.step != draft.state.checkpoint_step:
        # Newer checkpoints could not be read; the path of this one was not reported.
        draft.set(checkpoint_step=event.step, checkpoint_path="")


def _on_broken(draft: MembershipDraft, event: ev.WorldBroken) -> None:
    member = draft.members.get(event.member)
    if member is None:
        return
    world, proposal = draft.state.world, draft.state.proposal
    if proposal is not None and event.world == proposal.number:
        _on_preparation_failed(draft, ev.WorldPrepareFailed(event.member, event.world, event.suspects, event.cause))
        return
    live = world is not None and (event.world == world.number or _has_moved_on(world, event.member, event.world))
    if member.status in (REGROUPING, TRAINING, WAITING) and (live or event.world >= _last_world(draft, event)):
        draft.record_answer(event.member, event.step)
    if live:
        if (event.step or 0) <= draft.state.world_began_at:
            draft.count_failed_world()
        _suspect(draft, event)
        peers = f"its connection to {join_names(event.suspects)}" if event.suspects else "its connections"
        draft.dissolve(f"{event.member} lost {peers}" + (f": {event.cause}" if event.cause else ""))
    _lose_suspects(draft)


def _suspect(draft: MembershipDraft, event: ev.WorldBroken) -> None:
    """Mark the suspects of a broken world; quarantine repeated ones if the world never took a step."""
    no_progress = (event.step or 0) <= draft.state.world_began_at
    for name in event.suspects:
        if name in draft.members and name != event.member:
            suspect = draft.update(name, suspected=True)
            if no_progress:
                failures = suspect.failures + 1
                until = draft.now + draft.state.settings.quarantine_s * failures if failures > 1 else 0.0
                draft.update(name, failures=failures, quarantined_until=until)


def _last_world(draft: MembershipDraft, event: ev.WorldBroken) -> int:
    """Return the oldest world about which an answer counts: the live one if the member has a seat in it."""
    world = draft.state.world
    return world.number if world is not None and world.rank_of(event.member) is not None else 0


def _lose_suspects(draft: MembershipDraft) -> None:
    """Lose members that are both suspected by a peer and disconnected, without waiting for their leases."""
    for name in [m.name for m in draft.members.values() if m.suspected and not m.connected and m.status == REGROUPING]:
        draft.lose(name, "its connections to the coordinator and to a peer both broke")


def _on_entered(draft: MembershipDraft, event: ev.WorldEntered) -> None:
    world = draft.state.world
    if event.member not in draft.members:
        return
    entered = draft.proposed(event.world)
    if entered is not None:
        draft.enter(entered, event.step)
    elif world is None or event.world != world.number:
        draft.dissolve(f"{event.member} entered world {event.world}, which is not the live one")
        if draft.members[event.member].status == REGROUPING or world is None:
            number = max(event.world, draft.state.number)
            draft.instruct(ev.DissolveWorld(number, (event.member,), f"world {event.world} has ended"))


def _on_preparation_failed(draft: MembershipDraft, event: ev.WorldPrepareFailed) -> None:
    proposal, world = draft.state.proposal, draft.state.world
    if proposal is None or event.world != proposal.number:
        return
    draft.set(proposal=None)
    quarantine_s = draft.state.settings.quarantine_s
    for name in event.suspects:
        member = draft.members.get(name)
        if member is not None and (world is None or world.rank_of(name) is None):
            failures = member.failures + 1
            draft.update(name, failures=failures, quarantined_until=draft.now + quarantine_s * failures)
    note = f"{event.member} could not prepare world {event.world}: {event.cause}"
    draft.instruct(ev.MembershipNote(note, event.member))
    if not any(name in draft.members for name in event.suspects):
        # Without a suspect the same proposal would fail again at once: all joiners wait for a moment.
        for seat in proposal.seats:
            joiner = draft.members.get(seat.member)
            if joiner is not None and joiner.status == WAITING:
                draft.update(seat.member, quarantined_until=draft.now + quarantine_s)


def _on_disconnected(draft: MembershipDraft, event: ev.MemberDisconnected) -> None:
    if event.member in draft.members:
        draft.update(event.member, connected=False, disconnected_since=draft.now)
        _lose_suspects(draft)


def _on_lost(draft: MembershipDraft, event: ev.MemberLost) -> None:
    member = draft.members.get(event.member)
    if member is not None and member.connected:
        draft.instruct(ev.EvictMember(event.member, event.reason))
    draft.lose(event.member, event.reason, kind=event.note_kind)


def _on_notice(draft: MembershipDraft, event: ev.NoticeReceived) -> None:
    member = draft.members.get(event.member)
    if member is None:
        return
    stop_by = draft.now + event.within_s - max(CHECKPOINT_S, CHECKPOINT_PART * event.within_s)
    if member.leaving:
        # The machine may give less time than the first notice did.
        draft.update(event.member, stop_by=min(member.stop_by, stop_by))
    else:
        draft.update(event.member, leaving=event.cause, stop_by=stop_by)
        note = f"{event.member} will leave within {event.within_s:.0f} s: {event.cause}"
        draft.instruct(ev.MembershipNote(note, event.member, "MemberLeaving"))


def _on_left(draft: MembershipDraft, event: ev.MemberLeft) -> None:
    if event.member in draft.members:
        entered = draft.proposed(event.world)
        if entered is not None and event.step is not None:
            # It leaves only once all have agreed to cross, even if no other member has reported that yet.
            draft.enter(entered, event.step)
        draft.instruct(ev.MembershipNote(f"{event.member} has left", event.member, "MemberLeft"))
        draft.lose(event.member, "it left", planned=True)


def _on_done(draft: MembershipDraft, event: ev.MemberDone) -> None:
    if event.member in draft.members:
        draft.update(event.member, status=DONE, step=event.step)
    elif not event.early or event.member not in draft.state.lost_from_world:
        return
    draft.set(step=max(draft.state.step, event.step))
    if event.early:
        draft.end_at(event.member, event.step)
    else:
        draft.set(done_at=event.step, left_loop="")


def _on_claim_requested(draft: MembershipDraft, event: ev.ClaimRequested) -> None:
    claim = draft.claims.get(event.name)
    if claim is not None and claim.completed:
        draft.instruct(ev.AnnounceClaimCompleted((event.member,), event.name))
    elif claim is None or not claim.holder:
        draft.claims[event.name] = ClaimState(event.member)
        draft.instruct(ev.GrantClaim(event.member, event.name))
    elif claim.holder == event.member:
        draft.instruct(ev.GrantClaim(event.member, event.name))
    elif event.member not in claim.waiting:
        draft.claims[event.name] = replace(claim, waiting=(*claim.waiting, event.member))


def _on_claim_completed(draft: MembershipDraft, event: ev.ClaimCompleted) -> None:
    claim = draft.claims.get(event.name)
    if claim is not None and claim.holder == event.member:
        draft.claims[event.name] = replace(claim, waiting=(), completed=True)
        if claim.waiting:
            draft.instruct(ev.AnnounceClaimCompleted(claim.waiting, event.name))
        completed = [name for name, claim in draft.claims.items() if claim.completed]
        for name in completed[:-KEPT_CLAIMS]:
            del draft.claims[name]


def _on_checkpoint(draft: MembershipDraft, event: ev.CheckpointWritten) -> None:
    if draft.state.checkpoint_step is None or event.step >= draft.state.checkpoint_step:
        draft.set(checkpoint_step=event.step, checkpoint_path=event.path)


def _on_adjustment(draft: MembershipDraft, event: ev.AdjustmentReported) -> None:
    # Memory is adjusted by each member for itself; all else is common, whichever member reports it.
    key = f"memory of {event.member}" if event.what == "memory" else event.what
    latest = draft.state.adjustments.get(key)
    if latest is None or (latest.step, latest.values) != (event.step, event.values):
        draft.set(adjustments={**draft.state.adjustments, key: event})
        draft.instruct(ev.MembershipNote(f"from step {event.step} on: {event.reason}", member=event.member))


def _on_progress(draft: MembershipDraft, event: ev.ProgressRecorded) -> None:
    draft.set(step=max(draft.state.step, event.step))
    if event.step > draft.state.world_began_at:
        draft.set(failed_worlds=0)


def _on_stop(draft: MembershipDraft, event: ev.StopRequested) -> None:
    draft.stop(event)


def _on_scale(draft: MembershipDraft, event: ev.ScaleRequested) -> None:
    draft.set(settings=replace(draft.state.settings, min_members=event.min_members, max_members=event.max_members))
    note = f"scaled to {bounded(event.min_members, event.max_members, 'member')}"
    draft.instruct(ev.MembershipNote(note, kind="RunScaled"))


def _on_timer(draft: MembershipDraft, event: ev.TimerFired) -> None:
    if event.what == "regroup" and not any(m.status == WAITING and m.connected for m in draft.members.values()):
        # The members that were ready are lost; the wait starts again when the next one becomes ready.
        draft.set(regroup_until=None)
    if event.what == "quarantine":
        for name in [m.name for m in draft.members.values() if 0.0 < m.quarantined_until <= draft.now]:
            draft.update(name, quarantined_until=0.0)
    if event.what == "proposal":
        draft.repeat_proposal(list(draft.members))
    if event.what == "retry":
        draft.set(form_at=None)


def _on_restart(draft: MembershipDraft, _event: ev.CoordinatorRestarted) -> None:
    # All leases restart: heartbeats missed while the coordinator was down do not count. Many members need longer to
    # reconnect than few.
    since = draft.now + RETURN_S * len(draft.members)
    for name in list(draft.members):
        away = since + draft.state.settings.lease_s
        draft.update(name, connected=False, disconnected_since=away, since=since, suspected=False)
    note = "the coordinator restarted and replayed its journal"
    draft.instruct(ev.MembershipNote(note, kind="CoordinatorRestarted"))


def _ignore(_draft: MembershipDraft, _event: ev.Event) -> None:
    """Ignore events of parameter servers: the trainers of this run hold its state themselves."""


_ON_TRAINING = (
    ev.MemberDone,
    ev.CheckpointWritten,
    ev.AdjustmentReported,
    ev.WorldBroken,
    ev.WorldEntered,
    ev.WorldPrepareFailed,
)

_HANDLERS: dict[type, Callable[[MembershipDraft, Any], None]] = {
    ev.MemberConnected: _on_connected,
    ev.MemberReady: _on_ready,
    ev.WorldBroken: _on_broken,
    ev.WorldEntered: _on_entered,
    ev.WorldPrepareFailed: _on_preparation_failed,
    ev.PartCopied: _ignore,
    ev.PartReleased: _ignore,
    ev.ServerUnreachable: _ignore,
    ev.MemberDisconnected: _on_disconnected,
    ev.MemberLost: _on_lost,
    ev.NoticeReceived: _on_notice,
    ev.MemberLeft: _on_left,
    ev.MemberDone: _on_done,
    ev.ClaimRequested: _on_claim_requested,
    ev.ClaimCompleted: _on_claim_completed,
    ev.CheckpointWritten: _on_checkpoint,
    ev.AdjustmentReported: _on_adjustment,
    ev.ProgressRecorded: _on_progress,
    ev.StopRequested: _on_stop,
    ev.ScaleRequested: _on_scale,
    ev.TimerFired: _on_timer,
    ev.CoordinatorRestarted: _on_restart,
}
