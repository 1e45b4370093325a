"""Membership of a run with parameter servers: the events of `core.membership`, with placements instead of worlds.

Trainers join and leave freely: they are sent the placement, and the servers are told when a trainer is lost. What has
to be decided is the placement itself. The folder's docstring has the theory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from shoal.core import placement as core_placement
from shoal.core.membership import decide as mb
from shoal.core.membership import events as ev
from shoal.core.membership.draft import MembershipDraft, join_names
from shoal.core.membership.state import DONE, SERVER, STARTING, TRAINER, TRAINING, WAITING, MembershipState, MemberState
from shoal.core.note_kinds import NoteKind
from shoal.core.nouns import be, counted
from shoal.core.placement import PartAssignment, Placement
from shoal.core.world import Seat

# For so many leases the loss of a trainer is repeated to a new primary of the ledger: a server that missed it has
# reconnected, is lost or was replaced by then.
REPEATED_LEASES = 2


def decide(state: MembershipState, event: ev.Event, now: float) -> tuple[MembershipState, tuple[ev.Instruction, ...]]:
    """Return the next state and the instructions that follow from an event."""
    draft = PlacementDraft(state, now)
    if not mb.is_outsider(draft, event):
        _HANDLERS[type(event)](draft, event)
    draft.advance()
    return draft.result()


class PlacementDraft(MembershipDraft):
    """Working copy of the membership of a run with servers."""

    def of_role(self, role: str, *statuses: str) -> list[MemberState]:
        """Return the members of a role with one of these statuses, in the order in which they first connected."""
        members = [m for m in self.members.values() if m.role == role and m.status in statuses]
        return sorted(members, key=lambda m: m.order)

    def lose(self, name: str, reason: str, *, planned: bool = False, kind: NoteKind = "MemberLost") -> None:
        """Forget a member, tell the servers if it was a trainer, and pass its claims on."""
        if name not in self.members:
            return
        lost = self.members.pop(name)
        if self.state.restoring == name:
            self.set(restoring="")
        if not planned:
            self.set(losses=self.state.losses + 1)
            self.instruct(ev.MembershipNote(f"{name} is lost: {reason}", name, kind))
        if lost.role == TRAINER and self.state.placement is not None:
            servers = tuple(seat.member for seat in self.state.placement.servers if seat.member in self.members)
            self.instruct(ev.AnnounceTrainerLost(servers, name, lost.incarnation, reason))
            recent = [trainer for trainer in self.state.lost_trainers if self._is_recent(trainer[2])]
            self.set(lost_trainers=(*recent, (name, lost.incarnation, self.now)))
        if planned and self.state.stopping is not None and name == self.lead and not self.of_role(TRAINER, TRAINING):
            self.set(placement=None)  # it has written the checkpoint
            self.stop_without_state()
        self.pass_claims_on(name)

    def _is_recent(self, at: float) -> bool:
        return self.now - at <= REPEATED_LEASES * self.state.settings.lease_s

    @property
    def lead(self) -> str:
        """Primary of the ledger, which writes checkpoints; "" without a placement."""
        placement = self.state.placement
        return placement.assignments[core_placement.LEDGER].primary if placement is not None else ""

    def advance(self) -> None:
        """Finish or stop the run, place the state, or adapt the placement, as the members allow."""
        if self.state.finished:
            return
        if self.state.done_at is not None and not self.of_role(TRAINER, TRAINING):
            self.finish()
        elif self.state.stopping is not None:
            self.continue_stop()
        elif self.all_have_notice():
            self._stop_for_lack_of_members(list(self.members))
        elif self.state.placement is None:
            self.try_place()
        else:
            self.adapt(self.state.placement)
            self.admit()

    def all_have_notice(self) -> bool:
        """Return whether every server and trainer has to leave, so that no server could take a part over."""
        servers, trainers = (self.of_role(role, TRAINING, WAITING) for role in (SERVER, TRAINER))
        # Without a server no checkpoint can be written; one that was lost may come back.
        return self.state.placement is not None and bool(servers) and all(m.leaving for m in (*servers, *trainers))

    # --- the first placement of a generation

    def try_place(self) -> None:
        """Place the state on the servers that are ready, or have a checkpoint restored first."""
        able = [m for m in self.of_role(SERVER, WAITING) if m.connected and not m.leaving]
        if not able:
            self.wait("waiting for a server to become ready")
            return
        holder = next((m for m in able if m.step is not None and not m.stale), None)
        if self.state.started and holder is None:
            self._restore(able)
            return
        if not self.enough_of_both(able):
            return
        fitting = self._fitting([*able, *self.of_role(TRAINER, WAITING)])
        able = [m for m in able if m in fitting]
        if able:
            self.place(able, holder if holder in able else None)

    def enough_of_both(self, servers: list[MemberState]) -> bool:
        """Return whether there are enough servers and trainers to begin, or enough to begin after a while."""
        settings = self.state.settings
        trainers = [m for m in self.of_role(TRAINER, WAITING, TRAINING) if m.connected]
        if len(trainers) < settings.min_members:
            self.set(regroup_until=None)
            self.wait(
                f"{len(trainers)} of at least {counted(settings.min_members, 'trainer')} {be(len(trainers))} present"
            )
            return False
        if len(servers) >= settings.servers and (self.state.started or len(trainers) >= settings.max_members):
            return True
        return self.waited_for_more()

    def place(self, servers: list[MemberState], holder: MemberState | None) -> None:
        """Begin a generation on these servers; `holder` has restored the state, None if they build it fresh."""
        number, generation = self.state.number + 1, self.state.generation + 1
        names = [m.name for m in servers]
        parts = 1 + max(1, self.state.settings.servers)
        assignments = core_placement.initial(names, parts, number, holder.name if holder is not None else "")
        step = (holder.step or 0) if holder is not None else 0
        reason = f"the parameters are on {counted(len(names), 'server')} from step {step} on"
        for member in servers:
            self.update(member.name, status=TRAINING, stale=False, step=None)
        self.set(started=True, regroup_until=None, generation=generation, step=step)
        self.publish(Placement(number, generation, _seats(servers), assignments, fresh=holder is None), reason)
        self.admit()

    # --- changes

    def adapt(self, before: Placement) -> None:
        """Publish another placement if the servers that are present call for one."""
        seated = [self.members[seat.member] for seat in before.servers if self.is_seated(seat)]
        new = [m for m in self.of_role(SERVER, WAITING) if m.connected and not m.leaving]
        leaving = [m.name for m in seated if m.leaving]
        remaining, joining = [m.name for m in seated], [m.name for m in new]
        assignments = core_placement.reassign(before.assignments, remaining, joining, self.state.number + 1, leaving)
        if assignments is None:
            self.void(before)
            return
        held = {name for assignment in assignments for name in assignment.copies}
        staying = [m for m in (*seated, *new) if not m.leaving or m.name in held]
        if assignments == before.assignments and _seats(staying) == before.servers:
            return
        for member in new:
            self.update(member.name, status=TRAINING, step=None, stale=False)
        gone = [seat.member for seat in before.servers if not self.is_seated(seat)]
        parts = [_sentence(joining, "joins as a server"), _sentence(gone, "is gone")]
        handing_off = _newly_handing_off(before.assignments, assignments)
        parts += [_sentence(leaving, "leaves"), _sentence(handing_off, "hands a part to its backup")]
        reason = " and ".join(part for part in parts if part)
        self.set(joins=self.state.joins + len(new))
        self.publish(replace(before, servers=_seats(staying), assignments=assignments, fresh=before.fresh), reason)

    def is_seated(self, seat: Seat) -> bool:
        """Return whether the server of this seat is still the same process and serves."""
        member = self.members.get(seat.member)
        return member is not None and member.incarnation == seat.incarnation and member.status == TRAINING

    def void(self, before: Placement) -> None:
        """End the generation, because a part is lost with all servers that held it."""
        gone = [seat.member for seat in before.servers if not self.is_seated(seat)]
        reason = f"a part of the state is lost with {join_names(gone)}: restoring the newest checkpoint"
        for member in self.of_role(SERVER, TRAINING):
            self.update(member.name, status=WAITING, step=None, stale=False)
        self.set(placement=None)
        if self.state.stopping is not None:
            self.stop_without_state()
            return
        self.wait(reason)
        self.try_place()

    def stop_without_state(self) -> None:
        """Stop trainers and idle servers at once: the state is not restored during a stop, so no push can succeed."""
        self.tell_to_stop([m.name for m in self.of_role(TRAINER, STARTING, WAITING, TRAINING)], checkpoint=False)
        self.tell_to_stop([m.name for m in self.of_role(SERVER, WAITING)], checkpoint=False)

    def replace_lost_servers(self, before: Placement) -> None:
        """Promote the backups of lost servers; during a stop nothing else about the placement changes."""
        remaining = [self.members[seat.member] for seat in before.servers if self.is_seated(seat)]
        if len(remaining) == len(before.servers):
            return
        assignments = core_placement.promote_backups(before.assignments, [m.name for m in remaining])
        if assignments is None:
            self.void(before)
            return
        gone = [seat.member for seat in before.servers if not self.is_seated(seat)]
        self.publish(replace(before, servers=_seats(remaining), assignments=assignments), _sentence(gone, "is gone"))

    def change(self, part: int, assignment: PartAssignment, reason: str) -> None:
        """Publish a placement in which one part is assigned differently."""
        placement = self.state.placement
        assert placement is not None
        assignments = tuple(assignment if p == part else a for p, a in enumerate(placement.assignments))
        self.publish(replace(placement, assignments=assignments), reason)

    def publish(self, placement: Placement, reason: str) -> None:
        """Make a placement the current one and send it to all servers and trainers."""
        placement = replace(placement, number=max(placement.number, self.state.number + 1))
        before = self.state.placement
        self.set(placement=placement, number=placement.number, reason=reason)
        to = {seat.member for seat in placement.servers}
        to |= {m.name for m in self.members.values() if m.status == TRAINING}
        self.instruct(ev.PublishPlacement(placement, tuple(sorted(to)), reason))
        if (
            before is not None
            and before.assignments[core_placement.LEDGER] != placement.assignments[core_placement.LEDGER]
        ):
            self.repeat_lost_trainers()

    def repeat_lost_trainers(self) -> None:
        """Tell the primary of the ledger again which trainers were lost lately: it may have missed that."""
        for name, incarnation, at in self.state.lost_trainers:
            if name not in self.members and self._is_recent(at):
                reason = "repeated: the server of the ledger may have missed it"
                self.instruct(ev.AnnounceTrainerLost((self.lead,), name, incarnation, reason))

    def admit(self) -> None:
        """Let trainers that are ready begin, up to the maximum."""
        placement, limit = self.state.placement, self.state.settings.max_members
        if placement is None or self.state.done_at is not None:
            return
        room = limit - len(self.of_role(TRAINER, TRAINING))
        for member in self.of_role(TRAINER, WAITING)[: max(0, room)]:
            if member.connected and not member.leaving:
                self.update(member.name, status=TRAINING)
                self.set(joins=self.state.joins + 1)
                self.instruct(ev.PublishPlacement(placement, (member.name,), f"{member.name} joins as a trainer"))

    # --- the end

    def finish(self) -> None:
        """End the training; servers are done with it too."""
        step = self.state.done_at or 0
        others = tuple(m.name for m in self.members.values() if m.status != DONE)
        for member in self.of_role(SERVER, TRAINING):
            self.update(member.name, status=DONE)
        self.set(finished=True, placement=None, step=step, reason=f"finished at step {step}")
        self.instruct(ev.AnnounceFinished(others, step))

    def stop(self, request: ev.StopRequested) -> None:
        """Tell the trainers to stop, and the servers that do not serve; the others follow in `continue_stop`."""
        if self.state.stopping is None:
            self.set(stopping=request, reason=request.reason)
            self.repeat_stop([m.name for m in self.members.values() if m.role == TRAINER or m.status != TRAINING])
            if self.state.placement is None:
                self.stop_without_state()

    def continue_stop(self) -> None:
        """Stop in order: trainers, then the primary of the ledger with the checkpoint, then the other servers."""
        if self.state.placement is not None:
            self.replace_lost_servers(self.state.placement)
        if self.of_role(TRAINER, TRAINING):
            return
        request = self.state.stopping
        assert request is not None
        serving = [m.name for m in self.of_role(SERVER, TRAINING) if m.leaving != request.reason]
        if self.lead in serving:
            self.tell_to_stop([self.lead], request.checkpoint)
        elif self.lead not in self.members:
            self.tell_to_stop(serving, checkpoint=False)

    def remind(self, member: MemberState) -> None:
        """Tell a member that connected about a stop, if its turn has come, or about the end of the training."""
        request = self.state.stopping
        if request is not None and (
            member.role == TRAINER or member.status != TRAINING or member.leaving == request.reason
        ):
            keeps = member.name == self.lead or (member.role == TRAINER and self.state.placement is not None)
            self.tell_to_stop([member.name], request.checkpoint and keeps)
        if self.state.finished:
            self.instruct(ev.AnnounceFinished((member.name,), self.state.step))

    def tell_to_stop(self, names: Iterable[str], checkpoint: bool) -> None:
        """Tell these members to stop, and record it: they are `leaving` for the reason of the stop."""
        request = self.state.stopping
        assert request is not None
        for name in names:
            self.update(name, leaving=request.reason)
            self.instruct(ev.StopMembers((name,), request.reason, checkpoint, request.exit_code))


def _seats(members: Iterable[MemberState]) -> tuple[Seat, ...]:
    return tuple(Seat(m.name, m.incarnation, m.address) for m in members)


def _sentence(names: list[str], verb: str) -> str:
    return f"{join_names(names)} {verb}" if names else ""


def _newly_handing_off(before: tuple[PartAssignment, ...], after: tuple[PartAssignment, ...]) -> list[str]:
    """Return the primaries that are asked to hand a part off and were not before."""
    primaries = [new.primary for old, new in zip(before, after, strict=True) if new.handing_off and not old.handing_off]
    return list(dict.fromkeys(primaries))


def _on_connected(draft: PlacementDraft, event: ev.MemberConnected) -> None:
    before = draft.members.get(event.member)
    reconnected = before is not None and before.incarnation == event.incarnation
    mb.handle(draft, replace(event, done=False, broken=False))
    placement = draft.state.placement
    accepted = draft.members[event.member].incarnation == event.incarnation
    if accepted and event.done and event.step is not None:
        _on_done(draft, ev.MemberDone(event.member, event.step, event.early))
    elif reconnected and before is not None and before.status == TRAINING and placement is not None:
        reason = "repeated for a member that may have missed it"
        draft.instruct(ev.PublishPlacement(placement, (event.member,), reason))
        if event.member == draft.lead:
            draft.repeat_lost_trainers()


def _on_done(draft: PlacementDraft, event: ev.MemberDone) -> None:
    if event.member in draft.members:
        draft.update(event.member, status=DONE, step=event.step)
    elif not event.early:
        return
    draft.set(step=max(draft.state.step, event.step))
    # Trainers have no step in common at which all could end: each trains until its own script leaves the loop.
    if not event.early or not draft.of_role(TRAINER, TRAINING):
        draft.set(done_at=event.step)


def _on_copied(draft: PlacementDraft, event: ev.PartCopied) -> None:
    assignment = _assignment(draft, event.part, event.member)
    copied = core_placement.complete_copy(assignment, event.to, event.since) if assignment is not None else None
    if copied is not None and event.to in draft.members:
        draft.change(event.part, copied, f"{event.to} has a copy of {core_placement.part_name(event.part)}")


def _on_released(draft: PlacementDraft, event: ev.PartReleased) -> None:
    assignment = _assignment(draft, event.part, event.member)
    if assignment is not None and assignment.handing_off and assignment.backup:
        reason = f"{assignment.backup} takes over {core_placement.part_name(event.part)}"
        draft.change(event.part, core_placement.swap(assignment), reason)


def _on_unreachable(draft: PlacementDraft, event: ev.ServerUnreachable) -> None:
    server = draft.members.get(event.server)
    if server is None:
        return
    draft.update(event.server, suspected=True)
    if not server.connected:
        draft.lose(event.server, f"its connections to the coordinator and to {event.member} both broke")
        return
    placement = draft.state.placement
    if placement is None or event.number != placement.number:
        return
    for part, assignment in enumerate(placement.assignments):
        if assignment.primary == event.member and event.server in (assignment.backup, assignment.learner):
            reason = f"{event.member} cannot reach {event.server}: {event.cause}"
            draft.change(part, core_placement.drop_replica(assignment, event.server), reason)
            return


def _on_disconnected(draft: PlacementDraft, event: ev.MemberDisconnected) -> None:
    member = draft.members.get(event.member)
    if member is None:
        return
    draft.update(event.member, connected=False, disconnected_since=draft.now)
    if member.role == SERVER and member.suspected and member.status != DONE:
        draft.lose(event.member, "its connections to the coordinator and to a peer both broke")


def _assignment(draft: PlacementDraft, part: int, primary: str) -> PartAssignment | None:
    """Return the assignment of a part, None unless this member is its primary."""
    placement = draft.state.placement
    if placement is None or not 0 <= part < len(placement.assignments):
        return None
    assignment = placement.assignments[part]
    return assignment if assignment.primary == primary else None


def _as_without_servers(draft: PlacementDraft, event: ev.Event) -> None:
    mb.handle(draft, event)


def _ignore(_draft: PlacementDraft, _event: ev.Event) -> None:
    """Ignore events of worlds, which a run with servers does not have."""


_HANDLERS: dict[type, Callable[[PlacementDraft, Any], None]] = {
    ev.MemberConnected: _on_connected,
    ev.MemberReady: _as_without_servers,
    ev.WorldBroken: _ignore,
    ev.WorldEntered: _ignore,
    ev.WorldPrepareFailed: _ignore,
    ev.PartCopied: _on_copied,
    ev.PartReleased: _on_released,
    ev.ServerUnreachable: _on_unreachable,
    ev.MemberDisconnected: _on_disconnected,
    ev.MemberLost: _as_without_servers,
    ev.NoticeReceived: _as_without_servers,
    ev.MemberLeft: _as_without_servers,
    ev.MemberDone: _on_done,
    ev.ClaimRequested: _as_without_servers,
    ev.ClaimCompleted: _as_without_servers,
    ev.CheckpointWritten: _as_without_servers,
    ev.AdjustmentReported: _as_without_servers,
    ev.ProgressRecorded: _as_without_servers,
    ev.StopRequested: _as_without_servers,
    ev.ScaleRequested: _as_without_servers,
    ev.TimerFired: _as_without_servers,
    ev.CoordinatorRestarted: _as_without_servers,
}
