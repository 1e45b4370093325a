"""Who takes part in a run: leases, worlds, joins, notices, losses.

`decide(state, event, now)` is the only door: it returns the next state and what to tell whom, each with a reason.
`due(state, beats, now)` says which timers have run out, as events. Neither knows of sockets, clocks or processes,
so the journal's events, decided again in order, give the same state.

A member's life::

    starting ──ready──▶ waiting ──formed, switched──▶ training ──last step──▶ done
                          ▲  ▲                          │
                          │  └─────────answered──── out ◀──world dissolved
                          └───────────put aside─────────┘          (any state: lost, left → forgotten)

Only one world is live. An unplanned change dissolves it, and the next is formed from those who answer. A planned one is
proposed beside it: its members connect in the background and cross over at a step boundary of their own choosing.
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
from shoal.core.world import World

# What is kept of a notice to write a checkpoint, should nobody come to take over: seconds, and a part of it.
CHECKPOINT_S, CHECKPOINT_PART = 5.0, 0.25
# A script that saves in every epoch makes a claim each time; nobody asks for one so old any more.
KEPT_CLAIMS = 1000

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
    """The next state, and what to tell whom."""
    draft = MembershipDraft(state, now)
    handle(draft, event)
    draft.advance()
    return draft.freeze(), tuple(draft.asked)


def handle(draft: MembershipDraft, event: ev.Event) -> None:
    """Note what an event says; whoever made the draft decides what follows from it."""
    _HANDLERS[type(event)](draft, event)


def _on_hello(draft: MembershipDraft, event: ev.MemberConnected) -> None:
    known = draft.members.get(event.member)
    if known is not None and known.incarnation != event.incarnation:
        if known.connected:
            draft.ask(
                ev.RejectMember(
                    event.member,
                    event.incarnation,
                    "S205",
                    f"a member named {event.member} is already in this run",
                    why="its connection is open and its lease is fresh",
                    do="give this one another name, or wait until the other is gone",
                )
            )
            return
        draft.lose(event.member, "another process took its name")
        known = None
    if known is None:
        draft.set(order=draft.base.order + 1)
        draft.members[event.member] = MemberState(
            name=event.member,
            incarnation=event.incarnation,
            address=event.address,
            status=STARTING,
            order=draft.base.order,
            since=draft.now,
            step=event.step,
            stale=event.step is not None,
            role=event.role,
        )
        if event.done and event.step is not None:
            _was_done(draft, event, event.step)
        elif event.world is not None:
            draft.ask(ev.EvictMember(event.member, "it is not in the run any more"))
        draft.remind(draft.members[event.member])
        return
    draft.update(event.member, connected=True, disconnected_since=None, suspected=False, address=event.address)
    if draft.base.restoring == event.member:
        draft.set(restoring="")  # it may not have heard that it was asked
    _find_place(draft, known, event)
    draft.remind(known)


def _find_place(draft: MembershipDraft, known: MemberState, event: ev.MemberConnected) -> None:
    """Puts a member that found the coordinator again where it says it is."""
    if event.done and event.step is not None:
        _on_done(draft, ev.MemberDone(event.member, event.step, event.early))
    elif known.status == STARTING and event.world is not None:
        draft.ask(ev.EvictMember(event.member, "it is not in the run any more"))
    elif event.broken and event.world is not None:
        crossed = draft.proposed(event.world)
        if crossed is not None and event.step is not None:
            draft.enter(crossed, event.step)
        _on_broke(draft, ev.WorldBroken(event.member, event.world, event.step))
        _repeat_news(draft, event)
    elif (crossed := draft.proposed(event.world)) is not None and event.step is not None:
        draft.enter(crossed, event.step)
    elif draft.base.world is not None and _is_past(draft.base.world, event.member, event.world or 0):
        _on_entered(draft, ev.WorldEntered(event.member, event.world or 0, event.step or 0))
    elif _repeat_news(draft, event):
        draft.repeat_proposal([event.member])
    elif known.status == REGROUPING:
        draft.ask(ev.DissolveWorld(draft.base.number, (event.member,), "the world ended while it was away"))
    elif known.status == WAITING and event.world is not None:
        draft.ask(ev.DissolveWorld(event.world, (event.member,), "that world is over"))
    else:
        draft.repeat_proposal([event.member])


def _is_past(world: World, member: str, number: int) -> bool:
    """Whether a member of this world has left it for a later one, of which nobody else has told, or will."""
    return number > world.number and world.rank_of(member) is not None


def _repeat_news(draft: MembershipDraft, event: ev.MemberConnected) -> bool:
    """Whether a member has a seat in the live world and is not in it; then it is told again."""
    world = draft.base.world
    missed = world is not None and world.rank_of(event.member) is not None and event.world != world.number
    if world is not None and missed:
        draft.ask(ev.FormWorld(world, (event.member,), "it missed the news of this world"))
    return missed


def _was_done(draft: MembershipDraft, event: ev.MemberConnected, step: int) -> None:
    """It was taken for lost, but has done the last step, or left the loop, which then ends nothing for the others."""
    draft.update(event.member, status=DONE)
    if not event.early:
        draft.set(step=max(draft.base.step, step), done_at=step)


def _on_ready(draft: MembershipDraft, event: ev.MemberReady) -> None:
    member = draft.members.get(event.member)
    if member is None or member.status in (TRAINING, DONE):
        return
    draft.update(member.name, fingerprint=event.fingerprint, speed=event.speed)
    if draft.base.fingerprint not in ("", event.fingerprint):
        draft.turn_away(member.name)
        return
    if event.restored:
        if draft.base.restoring == member.name:
            draft.set(restoring="")
        if event.step is None:
            draft.ask(
                ev.MembershipNote(
                    f"there is no checkpoint: training starts over, {draft.base.step} steps are done again"
                )
            )
            draft.set(started=False, step=0)
        else:
            draft.ask(ev.MembershipNote(f"{member.name} restored the checkpoint of step {event.step}"))
        if event.step != draft.base.checkpoint_step:
            # Newer ones that we know of could not be read; where this one is, nobody has told.
            draft.set(checkpoint_step=event.step, checkpoint_path="")
    stale = member.stale and not event.restored
    draft.update(member.name, status=WAITING, step=event.step, stale=stale and event.step is not None)
    if not draft.base.started and draft.base.regroup_until is not None:
        draft.set(regroup_until=draft.now + draft.base.settings.regroup_s)


def _on_broke(draft: MembershipDraft, event: ev.WorldBroken) -> None:
    member = draft.members.get(event.member)
    if member is None:
        return
    world, proposal = draft.base.world, draft.base.proposal
    if proposal is not None and event.world == proposal.number:
        _on_preparation_failed(draft, ev.WorldPrepareFailed(event.member, event.world, event.suspects, event.cause))
        return
    live = world is not None and (event.world == world.number or _is_past(world, event.member, event.world))
    if member.status in (REGROUPING, TRAINING, WAITING) and (live or event.world >= _last_world(draft, event)):
        draft.answered(event.member, event.step)
    if live:
        _strike(draft, event)
        who = f" with {join_names(event.suspects)}" if event.suspects else ""
        draft.dissolve(f"{event.member} lost touch{who}" + (f": {event.cause}" if event.cause else ""))
    _drop_the_suspected(draft)


def _strike(draft: MembershipDraft, event: ev.WorldBroken) -> None:
    """Suspects of a world that never took a step sit out for a while, longer each time."""
    no_progress = (event.step or 0) <= draft.base.world_began_at
    for name in event.suspects:
        if name in draft.members and name != event.member:
            suspect = draft.update(name, suspected=True)
            if no_progress:
                failures = suspect.failures + 1
                bench = draft.now + draft.base.settings.quarantine_s * failures if failures > 1 else 0.0
                draft.update(name, failures=failures, quarantined_until=bench)


def _last_world(draft: MembershipDraft, event: ev.WorldBroken) -> int:
    """An answer about an older world says nothing about a newer one that the member was told to enter."""
    world = draft.base.world
    in_newer = world is not None and world.rank_of(event.member) is not None
    return world.number if in_newer and world is not None else 0


def _drop_the_suspected(draft: MembershipDraft) -> None:
    """A member that is both disconnected and suspected by a peer is gone; nobody waits for its lease."""
    for name in [m.name for m in draft.members.values() if m.suspected and not m.connected and m.status == REGROUPING]:
        draft.lose(name, "its connections to the coordinator and to a peer both broke")


def _on_entered(draft: MembershipDraft, event: ev.WorldEntered) -> None:
    world = draft.base.world
    if event.member not in draft.members:
        return
    crossed = draft.proposed(event.world)
    if crossed is not None:
        draft.enter(crossed, event.step)
    elif world is None or event.world != world.number:
        draft.dissolve(f"{event.member} entered world {event.world}, which is not the live one")
        if draft.members[event.member].status == REGROUPING or world is None:
            draft.ask(ev.DissolveWorld(max(event.world, draft.base.number), (event.member,), "that world is over"))


def _on_preparation_failed(draft: MembershipDraft, event: ev.WorldPrepareFailed) -> None:
    proposal, world = draft.base.proposal, draft.base.world
    if proposal is None or event.world != proposal.number:
        return
    draft.set(proposal=None)
    for name in event.suspects:
        member = draft.members.get(name)
        if member is not None and (world is None or world.rank_of(name) is None):
            failures = member.failures + 1
            draft.update(
                name, failures=failures, quarantined_until=draft.now + draft.base.settings.quarantine_s * failures
            )
    draft.ask(
        ev.MembershipNote(f"world {event.world} could not be prepared by {event.member}: {event.cause}", event.member)
    )
    if not any(n in draft.members for n in event.suspects):
        # Nobody to blame: propose again only when something changes, or after a breath.
        for seat in proposal.seats:
            joiner = draft.members.get(seat.member)
            if joiner is not None and joiner.status == WAITING:
                draft.update(seat.member, quarantined_until=draft.now + draft.base.settings.quarantine_s)


def _on_disconnected(draft: MembershipDraft, event: ev.MemberDisconnected) -> None:
    if event.member in draft.members:
        draft.update(event.member, connected=False, disconnected_since=draft.now)
        _drop_the_suspected(draft)


def _on_lost(draft: MembershipDraft, event: ev.MemberLost) -> None:
    known = draft.members.get(event.member)
    if known is not None and known.connected:
        draft.ask(ev.EvictMember(event.member, event.reason))
    draft.lose(event.member, event.reason)


def _on_notice(draft: MembershipDraft, event: ev.NoticeReceived) -> None:
    member = draft.members.get(event.member)
    if member is None:
        return
    stop_by = draft.now + event.within_s - max(CHECKPOINT_S, CHECKPOINT_PART * event.within_s)
    if member.leaving:
        # Its machine may have less time than it knew itself.
        draft.update(event.member, stop_by=min(member.stop_by, stop_by))
    else:
        draft.update(event.member, leaving=event.cause, stop_by=stop_by)
        draft.ask(
            ev.MembershipNote(f"{event.member} will leave within {event.within_s:.0f} s: {event.cause}", event.member)
        )


def _on_left(draft: MembershipDraft, event: ev.MemberLeft) -> None:
    if event.member in draft.members:
        crossed = draft.proposed(event.world)
        if crossed is not None and event.step is not None:
            # It goes only when all have agreed to cross, even if nobody has told us yet.
            draft.enter(crossed, event.step)
        draft.ask(ev.MembershipNote(f"{event.member} has left", member=event.member))
        draft.lose(event.member, "it left", planned=True)


def _on_done(draft: MembershipDraft, event: ev.MemberDone) -> None:
    if event.member not in draft.members:
        return
    draft.update(event.member, status=DONE, step=event.step)
    draft.set(step=max(draft.base.step, event.step))
    if not event.early or not draft.others_go_on():
        draft.set(done_at=event.step)


def _on_claimed(draft: MembershipDraft, event: ev.ClaimRequested) -> None:
    claim = draft.claims.get(event.name)
    if claim is None or not claim.holder:
        if claim is not None and claim.completed:
            draft.ask(ev.AnnounceClaimCompleted((event.member,), event.name))
            return
        draft.claims[event.name] = ClaimState(event.member)
        draft.ask(ev.GrantClaim(event.member, event.name))
    elif claim.completed:
        draft.ask(ev.AnnounceClaimCompleted((event.member,), event.name))
    elif claim.holder == event.member:
        draft.ask(ev.GrantClaim(event.member, event.name))
    elif event.member not in claim.waiting:
        draft.claims[event.name] = replace(claim, waiting=(*claim.waiting, event.member))


def _on_fulfilled(draft: MembershipDraft, event: ev.ClaimCompleted) -> None:
    claim = draft.claims.get(event.name)
    if claim is not None and claim.holder == event.member:
        draft.claims[event.name] = replace(claim, waiting=(), completed=True)
        if claim.waiting:
            draft.ask(ev.AnnounceClaimCompleted(claim.waiting, event.name))
        completed = [name for name, one in draft.claims.items() if one.completed]
        for name in completed[:-KEPT_CLAIMS]:
            del draft.claims[name]


def _on_checkpoint(draft: MembershipDraft, event: ev.CheckpointWritten) -> None:
    if draft.base.checkpoint_step is None or event.step >= draft.base.checkpoint_step:
        draft.set(checkpoint_step=event.step, checkpoint_path=event.path)


def _on_decided(draft: MembershipDraft, event: ev.AdjustmentReported) -> None:
    # Memory is each member's own; all else is everybody's, whoever tells.
    key = f"memory of {event.member}" if event.what == "memory" else event.what
    known = draft.base.adjustments.get(key)
    if known is None or (known.step, known.values) != (event.step, event.values):
        draft.set(adjustments={**draft.base.adjustments, key: event})
        draft.ask(ev.MembershipNote(f"from step {event.step} on: {event.reason}", member=event.member))


def _on_progress(draft: MembershipDraft, event: ev.ProgressRecorded) -> None:
    draft.set(step=max(draft.base.step, event.step))


def _on_stop(draft: MembershipDraft, event: ev.StopRequested) -> None:
    draft.stop(event)


def _on_scale(draft: MembershipDraft, event: ev.ScaleRequested) -> None:
    rules = replace(draft.base.settings, min_members=event.min_members, max_members=event.max_members)
    draft.set(settings=rules)
    draft.ask(ev.MembershipNote(f"scaled to {event.min_members}:{event.max_members} members"))


def _on_timer(draft: MembershipDraft, event: ev.TimerFired) -> None:
    if event.what == "regroup" and not any(m.status == WAITING and m.connected for m in draft.members.values()):
        # Whoever was gathered for is gone; the next to become ready starts the wait anew.
        draft.set(regroup_until=None)
    if event.what == "quarantine":
        for name in [m.name for m in draft.members.values() if 0.0 < m.quarantined_until <= draft.now]:
            draft.update(name, quarantined_until=0.0)
    if event.what == "proposal":
        draft.repeat_proposal(list(draft.members))


def _on_restart(draft: MembershipDraft, _event: ev.CoordinatorRestarted) -> None:
    # Every lease starts anew: silence while nobody listened is no silence, and a thousand do not come back at once.
    since = draft.now + RETURN_S * len(draft.members)
    for name in list(draft.members):
        away = since + draft.base.settings.lease_s
        draft.update(name, connected=False, disconnected_since=away, since=since, suspected=False)
    draft.ask(ev.MembershipNote("the coordinator is back and has read its journal"))


def _ignore(_draft: MembershipDraft, _event: ev.Event) -> None:
    """The state of this run is held by its trainers, not by servers."""


_HANDLERS: dict[type, Callable[[MembershipDraft, Any], None]] = {
    ev.MemberConnected: _on_hello,
    ev.MemberReady: _on_ready,
    ev.WorldBroken: _on_broke,
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
    ev.ClaimRequested: _on_claimed,
    ev.ClaimCompleted: _on_fulfilled,
    ev.CheckpointWritten: _on_checkpoint,
    ev.AdjustmentReported: _on_decided,
    ev.ProgressRecorded: _on_progress,
    ev.StopRequested: _on_stop,
    ev.ScaleRequested: _on_scale,
    ev.TimerFired: _on_timer,
    ev.CoordinatorRestarted: _on_restart,
}
