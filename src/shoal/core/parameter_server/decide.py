"""Who takes part in a run whose state is held by servers: the same events as `core.membership`, without worlds.

Trainers come and go freely: they are told who the servers are, and the servers are told when one is gone. What has to
be decided is the placement of the state's parts on servers (see `core.shards`): it changes when a server comes, goes,
has received its copy, or has come to rest so that another can take over. If a part is lost with all that held it, the
placement is void, and the next one begins a new life from the newest checkpoint.
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
from shoal.core.placement import PartAssignment, Placement
from shoal.core.world import Seat

# A server that misses who is gone is itself lost, back, or replaced within about a lease.
LATELY_LEASES = 2


def decide(state: MembershipState, event: ev.Event, now: float) -> tuple[MembershipState, tuple[ev.Instruction, ...]]:
    """The next state, and what to tell whom."""
    draft = PlacementDraft(state, now)
    _HANDLERS[type(event)](draft, event)
    draft.advance()
    return draft.freeze(), tuple(draft.asked)


class PlacementDraft(MembershipDraft):
    """A state under change, in which placements stand for worlds."""

    def of_role(self, role: str, *statuses: str) -> list[MemberState]:
        found = [m for m in self.members.values() if m.role == role and m.status in statuses]
        return sorted(found, key=lambda m: m.order)

    def lose(self, name: str, reason: str, *, planned: bool = False) -> None:
        if name not in self.members:
            return
        gone = self.members.pop(name)
        if self.base.restoring == name:
            self.set(restoring="")
        if not planned:
            self.set(losses=self.base.losses + 1)
            self.ask(ev.MembershipNote(f"{name} is lost: {reason}", member=name))
        if gone.role == TRAINER and self.base.placement is not None:
            servers = tuple(seat.member for seat in self.base.placement.servers if seat.member in self.members)
            self.ask(ev.AnnounceTrainerLost(servers, name, gone.incarnation, reason))
            lately = [
                one
                for one in self.base.lost_trainers
                if self.now - one[2] <= LATELY_LEASES * self.base.settings.lease_s
            ]
            self.set(lost_trainers=(*lately, (name, gone.incarnation, self.now)))
        if planned and self.base.stopping is not None and name == self.lead and not self.of_role(TRAINER, TRAINING):
            self.set(placement=None)  # it has left all in a checkpoint
            self.let_go_of_the_state()
        self.pass_claims_on(name)

    @property
    def lead(self) -> str:
        """Whoever keeps the ledger, and so writes checkpoints."""
        placement = self.base.placement
        return placement.assignments[core_placement.LEDGER].primary if placement is not None else ""

    def advance(self) -> None:
        if self.base.finished:
            return
        if self.base.done_at is not None and not self.of_role(TRAINER, TRAINING):
            self.finish()
        elif self.base.stopping is not None:
            self.go_on_stopping()
        elif self.all_leave():
            self._stop_for_lack_of_members(list(self.members))
        elif self.base.placement is None:
            self.try_place()
        else:
            self.restaff(self.base.placement)
            self.admit()

    def all_leave(self) -> bool:
        """Whether everybody was told to go, so that nobody is left to hand anything to."""
        servers, trainers = (self.of_role(role, TRAINING, WAITING) for role in (SERVER, TRAINER))
        # Without a server there is nothing to stop with: one that was lost may be back.
        return self.base.placement is not None and bool(servers) and all(m.leaving for m in (*servers, *trainers))

    # --- the first placement of a life

    def try_place(self) -> None:
        able = [m for m in self.of_role(SERVER, WAITING) if m.connected and not m.leaving]
        if not able:
            self.wait_for("waiting for a server to become ready")
            return
        holder = next((m for m in able if m.step is not None and not m.stale), None)
        if self.base.started and holder is None:
            self._restore(able)
            return
        if not self.enough_of_both(able):
            return
        fitting = self._fitting([*able, *self.of_role(TRAINER, WAITING)])
        able = [m for m in able if m in fitting]
        if able:
            self.place(able, holder if holder in able else None)

    def enough_of_both(self, servers: list[MemberState]) -> bool:
        rules = self.base.settings
        trainers = [m for m in self.of_role(TRAINER, WAITING, TRAINING) if m.connected]
        if len(trainers) < rules.min_members:
            self.set(regroup_until=None)
            self.wait_for(f"{len(trainers)} of at least {rules.min_members} trainers are present")
            return False
        if len(servers) >= rules.servers and (self.base.started or len(trainers) >= rules.max_members):
            return True
        if self.base.regroup_until is None:
            self.set(regroup_until=self.now + rules.regroup_s)
        until = self.base.regroup_until
        return until is not None and self.now >= until

    def place(self, servers: list[MemberState], holder: MemberState | None) -> None:
        number, life = self.base.number + 1, self.base.generation + 1
        names = [m.name for m in servers]
        parts = 1 + max(1, self.base.settings.servers)
        holdings = core_placement.initial(names, parts, number, holder.name if holder is not None else "")
        step = (holder.step or 0) if holder is not None else 0
        reason = f"{len(names)} servers hold the parameters from step {step} on"
        for member in servers:
            self.update(member.name, status=TRAINING, stale=False, step=None)
        self.set(started=True, regroup_until=None, generation=life, step=step)
        self.publish(Placement(number, life, _seats(servers), holdings, fresh=holder is None), reason)
        self.admit()

    # --- changes

    def restaff(self, before: Placement) -> None:
        """Adapt the placement to the servers that are there."""
        seated = [self.members[seat.member] for seat in before.servers if self.is_seated(seat)]
        new = [m for m in self.of_role(SERVER, WAITING) if m.connected and not m.leaving]
        leaving = [m.name for m in seated if m.leaving]
        left, came = [m.name for m in seated], [m.name for m in new]
        holdings = core_placement.reassign(before.assignments, left, came, self.base.number + 1, leaving)
        if holdings is None:
            self.void(before)
            return
        held = {name for holding in holdings for name in holding.copies}
        staying = [m for m in (*seated, *new) if not m.leaving or m.name in held]
        if holdings == before.assignments and _seats(staying) == before.servers:
            return
        for member in new:
            self.update(member.name, status=TRAINING, step=None, stale=False)
        gone = [seat.member for seat in before.servers if not self.is_seated(seat)]
        parts = [_who(came, "joins as a server"), _who(gone, "is gone")]
        parts += [_who(leaving, "leaves"), _who(_differently(before.assignments, holdings), "changes its part")]
        reason = " and ".join(part for part in parts if part)
        self.set(joins=self.base.joins + len(new))
        self.publish(replace(before, servers=_seats(staying), assignments=holdings, fresh=before.fresh), reason)

    def is_seated(self, seat: Seat) -> bool:
        member = self.members.get(seat.member)
        return member is not None and member.incarnation == seat.incarnation and member.status == TRAINING

    def void(self, before: Placement) -> None:
        gone = [seat.member for seat in before.servers if not self.is_seated(seat)]
        reason = f"a part of the state is lost with {join_names(gone)}: going back to the newest checkpoint"
        for member in self.of_role(SERVER, TRAINING):
            self.update(member.name, status=WAITING, step=None, stale=False)
        self.set(placement=None)
        if self.base.stopping is not None:
            self.let_go_of_the_state()
            return
        self.wait_for(reason)
        self.try_place()

    def let_go_of_the_state(self) -> None:
        """While all stop, nobody brings the state back: trainers do not wait for it to take in what they have."""
        self.tell_to_stop([m.name for m in self.of_role(TRAINER, STARTING, WAITING, TRAINING)], checkpoint=False)
        self.tell_to_stop([m.name for m in self.of_role(SERVER, WAITING)], checkpoint=False)

    def stand_in(self, before: Placement) -> None:
        """While all stop, backups stand in for servers that are gone, and nothing else is changed any more."""
        left = [self.members[seat.member] for seat in before.servers if self.is_seated(seat)]
        if len(left) == len(before.servers):
            return
        holdings = core_placement.promote_backups(before.assignments, [m.name for m in left])
        if holdings is None:
            self.void(before)
            return
        gone = [seat.member for seat in before.servers if not self.is_seated(seat)]
        self.publish(replace(before, servers=_seats(left), assignments=holdings), _who(gone, "is gone"))

    def change(self, part: int, holding: PartAssignment, reason: str) -> None:
        placement = self.base.placement
        assert placement is not None
        holdings = tuple(holding if p == part else h for p, h in enumerate(placement.assignments))
        self.publish(replace(placement, assignments=holdings), reason)

    def publish(self, placement: Placement, reason: str) -> None:
        """Make a placement the current one and tell everybody."""
        placement = replace(placement, number=max(placement.number, self.base.number + 1))
        before = self.base.placement
        self.set(placement=placement, number=placement.number, reason=reason)
        to = {seat.member for seat in placement.servers}
        to |= {m.name for m in self.members.values() if m.status == TRAINING}
        self.ask(ev.PublishPlacement(placement, tuple(sorted(to)), reason))
        if (
            before is not None
            and before.assignments[core_placement.LEDGER] != placement.assignments[core_placement.LEDGER]
        ):
            self.repeat_gone()

    def repeat_gone(self) -> None:
        """Tell whoever keeps the ledger whom to wait for no longer: when that was told, it may not have been there."""
        for name, incarnation, at in self.base.lost_trainers:
            if name not in self.members and self.now - at <= LATELY_LEASES * self.base.settings.lease_s:
                self.ask(
                    ev.AnnounceTrainerLost(
                        (self.lead,), name, incarnation, "whoever keeps the ledger may have missed it"
                    )
                )

    def admit(self) -> None:
        """Let trainers that are ready begin."""
        placement, limit = self.base.placement, self.base.settings.max_members
        if placement is None or self.base.done_at is not None:
            return
        room = limit - len(self.of_role(TRAINER, TRAINING))
        for member in self.of_role(TRAINER, WAITING)[: max(0, room)]:
            if member.connected and not member.leaving:
                self.update(member.name, status=TRAINING)
                self.set(joins=self.base.joins + 1)
                self.ask(ev.PublishPlacement(placement, (member.name,), f"{member.name} joins as a trainer"))

    # --- the end

    def finish(self) -> None:
        step = self.base.done_at or 0
        others = tuple(m.name for m in self.members.values() if m.status != DONE)
        for member in self.of_role(SERVER, TRAINING):
            self.update(member.name, status=DONE)
        self.set(finished=True, placement=None, step=step, reason=f"finished at step {step}")
        self.ask(ev.AnnounceFinished(others, step))

    def stop(self, asked: ev.StopRequested) -> None:
        if self.base.stopping is None:
            self.set(stopping=asked, reason=asked.reason)
            told = [m.name for m in self.members.values() if m.role == TRAINER or m.status != TRAINING]
            self.repeat_stop(told)
            if self.base.placement is None:
                self.let_go_of_the_state()

    def go_on_stopping(self) -> None:
        """Trainers go first; then whoever keeps the ledger writes the checkpoint; then the other servers."""
        if self.base.placement is not None:
            self.stand_in(self.base.placement)
        if self.of_role(TRAINER, TRAINING):
            return
        asked = self.base.stopping
        assert asked is not None
        serving = [m.name for m in self.of_role(SERVER, TRAINING) if m.leaving != asked.reason]
        if self.lead in serving:
            self.tell_to_stop([self.lead], asked.checkpoint)
        elif self.lead not in self.members:
            self.tell_to_stop(serving, checkpoint=False)

    def remind(self, member: MemberState) -> None:
        """As of a run without servers, but these are told to stop one after the other."""
        asked = self.base.stopping
        if asked is not None and (
            member.role == TRAINER or member.status != TRAINING or member.leaving == asked.reason
        ):
            keeps = member.name == self.lead or (member.role == TRAINER and self.base.placement is not None)
            self.tell_to_stop([member.name], asked.checkpoint and keeps)
        if self.base.finished:
            self.ask(ev.AnnounceFinished((member.name,), self.base.step))

    def tell_to_stop(self, names: Iterable[str], checkpoint: bool) -> None:
        """Who was told is `leaving` for the reason of the stop."""
        asked = self.base.stopping
        assert asked is not None
        for name in names:
            self.update(name, leaving=asked.reason)
            self.ask(ev.StopMembers((name,), asked.reason, checkpoint, asked.exit_code))


def _seats(members: Iterable[MemberState]) -> tuple[Seat, ...]:
    return tuple(Seat(m.name, m.incarnation, m.address) for m in members)


def _who(names: list[str], what: str) -> str:
    return f"{join_names(names)} {what}" if names else ""


def _differently(before: tuple[PartAssignment, ...], after: tuple[PartAssignment, ...]) -> list[str]:
    asked = [a.primary for b, a in zip(before, after, strict=True) if a.handing_off and not b.handing_off]
    return list(dict.fromkeys(asked))


def _on_hello(draft: PlacementDraft, event: ev.MemberConnected) -> None:
    known = draft.members.get(event.member)
    again = known is not None and known.incarnation == event.incarnation
    mb.handle(draft, replace(event, done=False, broken=False))
    placement = draft.base.placement
    here = draft.members[event.member].incarnation == event.incarnation
    if here and event.done and event.step is not None:
        _on_done(draft, ev.MemberDone(event.member, event.step, event.early))
    elif again and known is not None and known.status == TRAINING and placement is not None:
        draft.ask(ev.PublishPlacement(placement, (event.member,), "it may have missed the news"))
        if event.member == draft.lead:
            draft.repeat_gone()


def _on_done(draft: PlacementDraft, event: ev.MemberDone) -> None:
    if event.member in draft.members:
        draft.update(event.member, status=DONE, step=event.step)
        draft.set(step=max(draft.base.step, event.step))
        if not event.early or not draft.of_role(TRAINER, TRAINING):
            draft.set(done_at=event.step)


def _on_copied(draft: PlacementDraft, event: ev.PartCopied) -> None:
    holding = _held(draft, event.part, event.member)
    done = core_placement.complete_copy(holding, event.to, event.since) if holding is not None else None
    if done is not None and event.to in draft.members:
        draft.change(event.part, done, f"{event.to} has a copy of {_name(event.part)}")


def _on_yielded(draft: PlacementDraft, event: ev.PartReleased) -> None:
    holding = _held(draft, event.part, event.member)
    if holding is not None and holding.handing_off and holding.backup:
        draft.change(event.part, core_placement.swap(holding), f"{holding.backup} takes {_name(event.part)} over")


def _on_unreachable(draft: PlacementDraft, event: ev.ServerUnreachable) -> None:
    server = draft.members.get(event.server)
    if server is None:
        return
    draft.update(event.server, suspected=True)
    if not server.connected:
        draft.lose(event.server, f"its connections to the coordinator and to {event.member} both broke")
        return
    placement = draft.base.placement
    if placement is None or event.number != placement.number:
        return
    for part, holding in enumerate(placement.assignments):
        if holding.primary == event.member and event.server in (holding.backup, holding.learner):
            reason = f"{event.member} cannot reach {event.server}: {event.cause}"
            draft.change(part, core_placement.drop_replica(holding, event.server), reason)
            return


def _on_disconnected(draft: PlacementDraft, event: ev.MemberDisconnected) -> None:
    member = draft.members.get(event.member)
    if member is None:
        return
    draft.update(event.member, connected=False, disconnected_since=draft.now)
    if member.role == SERVER and member.suspected and member.status != DONE:
        draft.lose(event.member, "its connections to the coordinator and to a peer both broke")


def _held(draft: PlacementDraft, part: int, primary: str) -> PartAssignment | None:
    placement = draft.base.placement
    if placement is None or not 0 <= part < len(placement.assignments):
        return None
    holding = placement.assignments[part]
    return holding if holding.primary == primary else None


def _name(part: int) -> str:
    return "the ledger" if part == core_placement.LEDGER else f"shard {part}"


def _as_ever(draft: PlacementDraft, event: ev.Event) -> None:
    mb.handle(draft, event)


def _ignore(_draft: PlacementDraft, _event: ev.Event) -> None:
    """There are no worlds here."""


_HANDLERS: dict[type, Callable[[PlacementDraft, Any], None]] = {
    ev.MemberConnected: _on_hello,
    ev.MemberReady: _as_ever,
    ev.WorldBroken: _ignore,
    ev.WorldEntered: _ignore,
    ev.WorldPrepareFailed: _ignore,
    ev.PartCopied: _on_copied,
    ev.PartReleased: _on_yielded,
    ev.ServerUnreachable: _on_unreachable,
    ev.MemberDisconnected: _on_disconnected,
    ev.MemberLost: _as_ever,
    ev.NoticeReceived: _as_ever,
    ev.MemberLeft: _as_ever,
    ev.MemberDone: _on_done,
    ev.ClaimRequested: _as_ever,
    ev.ClaimCompleted: _as_ever,
    ev.CheckpointWritten: _as_ever,
    ev.ProgressRecorded: _as_ever,
    ev.StopRequested: _as_ever,
    ev.ScaleRequested: _as_ever,
    ev.TimerFired: _as_ever,
    ev.CoordinatorRestarted: _as_ever,
}
