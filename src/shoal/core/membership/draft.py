"""Draft of a membership state: how worlds are dissolved, formed, proposed and entered. `decide` has the theory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from shoal import exit_codes
from shoal.core.draft import Draft
from shoal.core.membership import events as ev
from shoal.core.membership import fingerprint
from shoal.core.membership.state import DONE, REGROUPING, TRAINING, WAITING, MembershipState, MemberState
from shoal.core.note_kinds import NoteKind
from shoal.core.nouns import be, counted
from shoal.core.world import Seat, World

# Up to so many names are listed in full, of more than that only the first few.
LISTED_IN_FULL, LISTED_OF_MANY = 32, 8
# The pause before another world, after three in a row that broke before their first step; it doubles with each one.
RETRY_S, RETRY_MAX_S = 0.2, 15.0
KEPT_LOST = 32


class MembershipDraft(Draft[MembershipState, ev.Instruction]):
    """Working copy of a membership; `members` and `claims` are changed in place."""

    def __init__(self, state: MembershipState, now: float) -> None:
        super().__init__(state, now)
        self.members = dict(state.members)
        self.claims = dict(state.claims)

    def freeze(self) -> MembershipState:
        return replace(self.state, members=self.members, claims=self.claims)

    def update(self, name: str, **changes: object) -> MemberState:
        """Replace fields of a member and return it."""
        self.members[name] = replace(self.members[name], **changes)  # type: ignore[arg-type]
        return self.members[name]

    def wait(self, reason: str) -> None:
        """Record why the run waits; note it in the story if the reason is new."""
        if reason != self.state.reason:
            self.set(reason=reason)
            self.instruct(ev.MembershipNote(reason))

    # --- losing members, dissolving worlds

    def lose(self, name: str, reason: str, *, planned: bool = False, kind: NoteKind = "MemberLost") -> None:
        """Forget a member, dissolve the world if it had a seat there, and pass its claims on."""
        if name not in self.members:
            return
        status = self.members.pop(name).status
        world, proposal = self.state.world, self.state.proposal
        if self.state.restoring == name:
            self.set(restoring="")
        if status in (TRAINING, REGROUPING):
            self.set(lost_from_world=(*self.state.lost_from_world, name)[-KEPT_LOST:])
        if not planned:
            self.set(losses=self.state.losses + 1)
            self.instruct(ev.MembershipNote(f"{name} is lost: {reason}", name, kind))
        stopped = planned and self.state.stopping is not None
        if world is not None and world.rank_of(name) is not None and status != DONE and not stopped:
            self.dissolve(f"{name} is gone: {reason}")
        elif proposal is not None and proposal.rank_of(name) is not None:
            self.set(proposal=None)
        self.pass_claims_on(name)

    def dissolve(self, reason: str) -> None:
        """End the live world and the proposal; their members are REGROUPING until they answer."""
        world, proposal = self.state.world, self.state.proposal
        if world is None:
            return
        last = proposal.number if proposal is not None else world.number
        ranks = world.ranks()
        concerned = set(ranks)
        if proposal is not None:
            concerned |= {seat.member for seat in proposal.seats}
        for name in concerned & self.members.keys():
            member = self.members[name]
            if member.status == TRAINING:
                self.update(name, status=REGROUPING, rank=ranks.get(name, 0))
        to = tuple(n for n in sorted(concerned & self.members.keys()) if self.members[n].status == REGROUPING)
        self.set(world=None, proposal=None)
        self.instruct(ev.DissolveWorld(last, to, reason))

    def record_answer(self, name: str, step: int | None) -> None:
        """Record that a member has left its world and holds the state of `step`."""
        progress = (step or 0) > self.state.world_began_at
        failures = 0 if progress else self.members[name].failures
        if progress:
            self.set(failed_worlds=0, form_at=None)
        self.update(name, status=WAITING, step=step, stale=False, failures=failures)
        self.set(step=max(self.state.step, step or 0))

    def count_failed_world(self) -> None:
        """Count a world that broke before its first step; from the third in a row on, pause before the next one."""
        failed = self.state.failed_worlds + 1
        pause_s = min(RETRY_MAX_S, RETRY_S * 2.0 ** min(failed - 3, 16)) if failed > 2 else 0.0
        self.set(failed_worlds=failed, form_at=self.now + pause_s if pause_s else None)

    # --- what follows from an event

    def advance(self) -> None:
        """Finish the run, form a world, or propose a better one, if the members allow it now."""
        if self.state.finished:
            return
        if self.state.done_at is not None and not self.others_go_on():
            self.finish()
        elif self.state.world is None:
            self.try_form()
        else:
            self.try_propose()

    def others_go_on(self) -> bool:
        """Return whether a member still has to reach the last step, which another has done."""
        world = self.state.world
        if world is not None:
            seated = [self.members[s.member] for s in world.seats if s.member in self.members]
            return any(m.status in (TRAINING, REGROUPING) for m in seated)
        return any(
            m.status == REGROUPING or (m.status == WAITING and m.step is not None and not m.stale and not m.leaving)
            for m in self.members.values()
        )

    def finish(self) -> None:
        """End the training; tell the members that train, and those that left their loop and wait for the others."""
        step = self.state.done_at or 0
        to = tuple(m.name for m in self.members.values() if m.status != DONE or self.state.left_loop)
        cause = f": the script of {self.state.left_loop} left its loop" if self.state.left_loop else ""
        self.set(finished=True, world=None, proposal=None, reason=f"finished at step {step}{cause}")
        self.instruct(ev.AnnounceFinished(to, step))

    def end_at(self, name: str, step: int) -> None:
        """End the training at `step` for all members, because the script of one has left its loop there.

        If another has left at a later step, the later one counts; the last step of the data is never taken back.
        """
        latest = self.state.done_at
        if latest is not None and (not self.state.left_loop or step <= latest):
            return
        self.set(done_at=step, left_loop=self.state.left_loop or name)
        self.repeat_end(m.name for m in self.members.values() if m.status != DONE)

    def repeat_end(self, names: Iterable[str]) -> None:
        """Tell these members at which step the training ends, if a script has left its loop."""
        step, to = self.state.done_at, tuple(names)
        if self.state.left_loop and step is not None and not self.state.finished and to:
            self.instruct(ev.EndTraining(to, step, f"the script of {self.state.left_loop} left its training loop"))

    # --- forming a world when none is live

    def try_form(self) -> None:
        """Form the next world if all members that may hold state have answered and enough are ready."""
        awaited = [
            m.name
            for m in self.members.values()
            if m.status == REGROUPING or (not m.connected and self._may_reconnect(m))
        ]
        if awaited:
            self.wait(f"waiting for {join_names(awaited)} to answer")
            return
        if self.state.form_at is not None and self.now < self.state.form_at:
            self.wait("worlds break before their first step: pausing, each time longer, before the next one")
            return
        able = [m for m in self.members.values() if m.status == WAITING and m.connected]
        present = [m for m in able if m.quarantined_until <= self.now]
        if not present:
            if self.state.started or self.members:
                self.wait("waiting for members to become ready")
            return
        holders = self._holders(present)
        if self.state.started and not holders:
            self._restore(present)
            return
        staying = [m for m in present if not m.leaving]
        top = max((m.step or 0 for m in holders), default=0)
        holding = {m.name for m in holders}
        if not any(m.step == top for m in staying if m.name in holding) and holders:
            # Only leaving members hold the newest state: they take part to send it.
            staying += [m for m in holders if m.leaving and m.step == top]
        if self.state.stopping is None and holders and all(m.leaving for m in staying):
            if not self._with_time(staying):
                self._stop_for_lack_of_members([m.name for m in staying])
                return
            staying = self._with_time(staying)
        if not self._enough(staying):
            return
        fitting = self._fitting(staying)
        if self._enough(fitting):
            self._form(fitting, holders, top)

    def _may_reconnect(self, member: MemberState) -> bool:
        """Return whether a disconnected member that holds state is still waited for."""
        return member.status == WAITING and not member.connected and member.step is not None and not member.suspected

    def _holders(self, present: list[MemberState]) -> list[MemberState]:
        """Return the members whose state the run can go on from: fresh, or stale but not older than the checkpoint."""
        fresh = [m for m in present if m.step is not None and not m.stale]
        if fresh:
            return fresh
        stale = [m for m in present if m.step is not None]
        saved = self.state.checkpoint_step
        return [m for m in stale if saved is None or (m.step or 0) >= saved]

    def _restore(self, present: list[MemberState]) -> None:
        if self.state.restoring:
            return
        chosen = min(present, key=lambda m: m.order)
        reason = "no member holds the state any more: restoring the newest checkpoint"
        self.set(restoring=chosen.name)
        self.wait(reason)
        self.instruct(ev.RestoreCheckpoint(chosen.name, reason))

    def _enough(self, present: list[MemberState]) -> bool:
        """Return whether a world can be formed of these; the first world waits for more than the minimum."""
        settings = self.state.settings
        if self.state.stopping is not None or self.state.done_at is not None:
            return bool(present)
        if len(present) < settings.min_members:
            self.set(regroup_until=None)
            self.wait(
                f"{len(present)} of at least {counted(settings.min_members, 'member')} {be(len(present))} present"
            )
            return False
        return self.state.started or len(present) >= settings.max_members or self.waited_for_more()

    def waited_for_more(self) -> bool:
        """Return whether `regroup_s` have passed since there were enough members; start to wait if not yet done."""
        if self.state.regroup_until is None:
            self.set(regroup_until=self.now + self.state.settings.regroup_s)
        until = self.state.regroup_until
        return until is not None and self.now >= until

    def _fitting(self, present: list[MemberState]) -> list[MemberState]:
        """Return the members with the model of the run and reject the others; at first the majority decides."""
        if not self.state.fingerprint:
            count = Counter(m.fingerprint for m in sorted(present, key=lambda m: m.order))
            self.set(fingerprint=count.most_common(1)[0][0])
            for member in present:
                if member.fingerprint != self.state.fingerprint:
                    self.reject_model(member.name)
        return [m for m in present if m.name in self.members]

    def reject_model(self, name: str) -> None:
        """Reject a member whose model is not that of the run; this does not count as a loss."""
        member = self.members[name]
        differences = fingerprint.differences(self.state.fingerprint, member.fingerprint)
        noun = "data" if differences and differences[0].concerns_data else "model"
        same = "start every member from the same script, with the same model, optimizer, data and batch size"
        seed = "give generated data and random_split a seed, and read the same files everywhere"
        self.instruct(
            ev.RejectMember(
                name,
                member.incarnation,
                "S206",
                f"the {noun} of {name} differs from the {noun} of this run",
                why=fingerprint.describe(differences, name),
                do=seed if noun == "data" else same,
            )
        )
        self.lose(name, f"its {noun} differs", planned=True)

    def _form(self, present: list[MemberState], holders: list[MemberState], top: int) -> None:
        fresh = not holders
        names = {m.name for m in holders if m.step == top}
        present = sorted(present, key=lambda m: (m.name not in names, m.rank, m.order))
        chosen = present[: self.state.settings.max_members]
        number = self.state.number + 1
        sources = [0] if fresh else [r for r, m in enumerate(chosen) if m.name in names]
        receivers = sorted(set(range(len(chosen))) - set(sources))
        world = World(
            number=number,
            seats=_seats(chosen),
            step=top,
            fresh=fresh,
            sources=assign_sources(receivers, sources),
            catching_up=tuple(receivers) if not fresh and 2 * len(receivers) <= len(chosen) else (),
        )
        joined = sum(1 for m in chosen if m.step is None or m.stale)
        for rank, member in enumerate(chosen):
            self.update(member.name, status=TRAINING, rank=rank, stale=False, suspected=False)
        reason = f"world {number} formed from {counted(len(chosen), 'member')} at step {top}"
        if self.state.failed_worlds > 1:
            reason += f", after {self.state.failed_worlds} in a row that broke before their first step"
        self.set(
            world=world,
            number=number,
            started=True,
            restoring="",
            form_at=None,
            regroup_until=None,
            step=max(self.state.step, top) if not fresh else 0,
            world_began_at=top,
            joins=self.state.joins + joined,
            reason=reason,
        )
        self.instruct(ev.FormWorld(world, tuple(m.name for m in chosen), reason))
        self.repeat_stop(m.name for m in chosen)

    # --- proposing a world beside the live one

    def try_propose(self) -> None:
        """Propose a world with the members that are ready and without those that have to leave."""
        world = self.state.world
        if world is None or self.state.stopping is not None:
            return
        seated = [self.members[s.member] for s in world.seats if s.member in self.members]
        if any(m.status == DONE for m in seated):
            return
        if not seated:
            # All of its members were done and have left: none could send the state to a joiner.
            self.set(world=None, proposal=None)
            self.try_form()
            return
        staying = [m for m in seated if not m.leaving]
        joiners = sorted(
            (
                m
                for m in self.members.values()
                if m.status == WAITING and m.connected and not m.leaving and m.quarantined_until <= self.now
            ),
            key=lambda m: m.order,
        )
        limit = self.state.settings.max_members
        if not staying and not joiners:
            staying = self._with_time(seated)
            if not staying:
                self._stop_for_lack_of_members([m.name for m in seated])
                return
            self.wait("all members have notice; training continues until replacements join")
            if len(staying) == len(seated):
                return
        elif not staying:
            # The member that can stay longest sends the state, even if that is one member more than the maximum.
            limit = max(limit, 2)
            last = sorted(seated, key=lambda m: -m.stop_by)[: max(1, limit - len(joiners))]
            staying = [m for m in seated if m in last]
        target = staying[:limit] + joiners[: max(0, limit - len(staying))]
        if not any(m.leaving for m in target) and len(target) < self.state.settings.min_members:
            return
        self._propose(world, seated, target)

    def _propose(self, world: World, seated: list[MemberState], target: list[MemberState]) -> None:
        names = [m.name for m in target]
        if names == [s.member for s in world.seats]:
            self.set(proposal=None)
            return
        proposal = self.state.proposal
        if proposal is not None and all(seat.member in self.members for seat in proposal.seats):
            return  # its members may be crossing already; the next proposal follows when they have arrived
        number = self.state.number + 1
        ranks = world.ranks()
        sources = [r for r, m in enumerate(target) if m.name in ranks]
        receivers = [r for r, m in enumerate(target) if m.name not in ranks]
        new = World(
            number=number,
            seats=_seats(target),
            step=None,
            sources=assign_sources(receivers, sources),
            catching_up=tuple(receivers),
        )
        reason = _change(seated, target, [target[r].name for r in receivers])
        self.set(proposal=new, number=number, repeat_at=self.now + self.state.settings.lease_s)
        to = tuple(dict.fromkeys([s.member for s in world.seats] + names))
        self.instruct(ev.ProposeWorld(world.number, new, to, reason))

    def repeat_proposal(self, names: Iterable[str]) -> None:
        """Announce the proposal again to those of these members that it concerns; those that know it ignore that."""
        world, proposal = self.state.world, self.state.proposal
        if world is None or proposal is None:
            return
        concerned = world.ranks().keys() | proposal.ranks().keys()
        to = tuple(n for n in names if n in concerned)
        if to:
            reason = "repeated for members that may have missed it"
            self.instruct(ev.ProposeWorld(world.number, proposal, to, reason, is_new=False))
        self.set(repeat_at=self.now + self.state.settings.lease_s)

    def proposed(self, number: int | None) -> World | None:
        """Return the proposal if it has this number: members may have crossed into it."""
        proposal = self.state.proposal
        return proposal if proposal is not None and proposal.number == number else None

    def enter(self, proposal: World, step: int) -> None:
        """Make the proposal the live world, because one of its members has crossed into it."""
        before, ranks = self.state.world, proposal.ranks()
        for rank, seat in enumerate(proposal.seats):
            if seat.member in self.members and self.members[seat.member].status != DONE:
                self.update(seat.member, status=TRAINING, rank=rank, stale=False)
        for seat in before.seats if before is not None else ():
            if seat.member in self.members and seat.member not in ranks:
                self.update(seat.member, status=WAITING, step=step, stale=True)
        reason = f"world {proposal.number} with {counted(proposal.size, 'member')} from step {step}"
        self.set(
            world=replace(proposal, step=step),
            proposal=None,
            step=max(self.state.step, step),
            world_began_at=step,
            failed_worlds=0,
            joins=self.state.joins + len(proposal.sources),
            reason=reason,
        )
        self.instruct(ev.MembershipNote(reason, kind="WorldEntered", world=proposal.number, step=step))

    # --- stopping

    def _with_time(self, leaving: list[MemberState]) -> list[MemberState]:
        """Return the members that have notice, but can still wait for a replacement."""
        return [m for m in leaving if self.state.settings.replaces_members and m.stop_by > self.now]

    def _stop_for_lack_of_members(self, names: list[str]) -> None:
        cause = next((self.members[n].leaving for n in names if self.members[n].leaving), "all members leave")
        until_replaced = self.state.settings.replaces_members
        reason = f"all members have notice: {cause}"
        self.stop(ev.StopRequested(reason, True, exit_codes.RESUMABLE, until_replaced=until_replaced))

    def stop(self, request: ev.StopRequested) -> None:
        """Tell all members to stop, unless they have been told already."""
        if self.state.stopping is None:
            self.set(stopping=request, reason=request.reason)
            self.repeat_stop(self.members)

    def repeat_stop(self, names: Iterable[str]) -> None:
        """Tell these members to stop if the run is stopping."""
        request = self.state.stopping
        to = tuple(names)
        if request is not None and to:
            self.instruct(ev.StopMembers(to, request.reason, request.checkpoint, request.exit_code))

    def remind(self, member: MemberState) -> None:
        """Tell a member that connected about a stop or the end of the training: it may not know."""
        self.repeat_stop([member.name])
        if member.status != DONE:
            self.repeat_end([member.name])
        if self.state.finished:
            self.instruct(ev.AnnounceFinished((member.name,), self.state.step))

    # --- claims

    def pass_claims_on(self, gone: str) -> None:
        """Grant the open claims of a member that is gone to the next that waits for each."""
        for name, claim in self.claims.items():
            waiting = tuple(w for w in claim.waiting if w != gone)
            if claim.holder == gone and not claim.completed:
                heir = waiting[0] if waiting else ""
                self.claims[name] = replace(claim, holder=heir, waiting=waiting[1:])
                if heir:
                    self.instruct(ev.GrantClaim(heir, name))
            else:
                self.claims[name] = replace(claim, waiting=waiting)


def join_names(names: Iterable[str]) -> str:
    """Return the names for a sentence, or the first few and a count if there are many."""
    listed = list(names)
    if len(listed) <= LISTED_IN_FULL:
        return ", ".join(listed)
    return f"{', '.join(listed[:LISTED_OF_MANY])} and {len(listed) - LISTED_OF_MANY} others"


def assign_sources(receivers: list[int], sources: list[int]) -> dict[int, int]:
    """Return the source of each receiving rank; sources take turns."""
    return {rank: sources[i % len(sources)] for i, rank in enumerate(receivers)} if sources else {}


def _seats(members: Iterable[MemberState]) -> tuple[Seat, ...]:
    return tuple(Seat(m.name, m.incarnation, m.address, m.speed) for m in members)


def _change(seated: list[MemberState], target: list[MemberState], joining: list[str]) -> str:
    """Return how a proposed world differs from the live one, with the cause of the first member that leaves."""
    staying = {m.name for m in target}
    going = [m for m in seated if m.name not in staying]
    parts = [f"{join_names(joining)} joins"] if joining else []
    parts += [f"{join_names(m.name for m in going)} leaves"] if going else []
    causes = [m.leaving for m in going if m.leaving]
    return " and ".join(parts) + (f" ({causes[0]})" if causes else "")
