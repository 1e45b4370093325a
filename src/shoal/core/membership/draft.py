"""A state of membership under change: how worlds are dissolved, formed, proposed and entered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from shoal import exit_codes
from shoal.core.membership import events as ev
from shoal.core.membership.state import DONE, REGROUPING, TRAINING, WAITING, MembershipState, MemberState
from shoal.core.world import Seat, World

MANY, FEW = 32, 8


class MembershipDraft:
    """A state under change; it lives for one event."""

    def __init__(self, state: MembershipState, now: float) -> None:
        self.base = state
        self.now = now
        self.members = dict(state.members)
        self.claims = dict(state.claims)
        self.asked: list[ev.Instruction] = []

    def freeze(self) -> MembershipState:
        return replace(self.base, members=self.members, claims=self.claims)

    def set(self, **changes: object) -> None:
        self.base = replace(self.base, **changes)  # type: ignore[arg-type]

    def ask(self, instruction: ev.Instruction) -> None:
        self.asked.append(instruction)

    def wait_for(self, reason: str) -> None:
        if reason != self.base.reason:
            self.set(reason=reason)
            self.ask(ev.MembershipNote(reason))

    def update(self, name: str, **changes: object) -> MemberState:
        self.members[name] = replace(self.members[name], **changes)  # type: ignore[arg-type]
        return self.members[name]

    # --- losing, leaving, dissolving

    def lose(self, name: str, reason: str, *, planned: bool = False) -> None:
        if name not in self.members:
            return
        status = self.members.pop(name).status
        world, proposal = self.base.world, self.base.proposal
        if self.base.restoring == name:
            self.set(restoring="")
        if not planned:
            self.set(losses=self.base.losses + 1)
            self.ask(ev.MembershipNote(f"{name} is lost: {reason}", member=name))
        stopped = planned and self.base.stopping is not None
        if world is not None and world.rank_of(name) is not None and status != DONE and not stopped:
            self.dissolve(f"{name} is gone: {reason}")
        elif proposal is not None and proposal.rank_of(name) is not None:
            self.set(proposal=None)
        self.pass_claims_on(name)

    def dissolve(self, reason: str) -> None:
        """End the live world and any proposal; its members are out until they answer."""
        world, proposal = self.base.world, self.base.proposal
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
        tell = tuple(n for n in sorted(concerned & self.members.keys()) if self.members[n].status == REGROUPING)
        self.set(world=None, proposal=None)
        self.ask(ev.DissolveWorld(last, tell, reason))

    def answered(self, name: str, step: int | None) -> None:
        progress = (step or 0) > self.base.world_began_at
        self.update(
            name, status=WAITING, step=step, stale=False, failures=0 if progress else self.members[name].failures
        )
        self.set(step=max(self.base.step, step or 0))

    # --- moving on

    def advance(self) -> None:
        if self.base.finished:
            return
        if self.base.done_at is not None and not self.others_go_on():
            self.finish()
        elif self.base.world is None:
            self.try_form()
        else:
            self.try_propose()

    def others_go_on(self) -> bool:
        """Whether somebody still has to get as far as the one that was the first to be done."""
        world = self.base.world
        if world is not None:
            seated = [self.members[s.member] for s in world.seats if s.member in self.members]
            return any(m.status in (TRAINING, REGROUPING) for m in seated)
        return any(
            m.status == REGROUPING or (m.status == WAITING and m.step is not None and not m.stale and not m.leaving)
            for m in self.members.values()
        )

    def finish(self) -> None:
        step = self.base.done_at or 0
        others = tuple(m.name for m in self.members.values() if m.status != DONE)
        self.set(finished=True, world=None, proposal=None, reason=f"finished at step {step}")
        self.ask(ev.AnnounceFinished(others, step))

    def try_form(self) -> None:
        held_up = [
            m.name
            for m in self.members.values()
            if m.status == REGROUPING or (not m.connected and self._may_come_back(m))
        ]
        if held_up:
            self.wait_for(f"waiting for {join_names(held_up)} to answer")
            return
        able = [m for m in self.members.values() if m.status == WAITING and m.connected]
        present = [m for m in able if m.quarantined_until <= self.now]
        if not present:
            if self.base.started or self.members:
                self.wait_for("waiting for members to become ready")
            return
        holders = self._holders(present)
        if self.base.started and not holders:
            self._restore(present)
            return
        staying = [m for m in present if not m.leaving]
        top = max((m.step or 0 for m in holders), default=0)
        holding = {m.name for m in holders}
        if not any(m.step == top for m in staying if m.name in holding) and holders:
            # The only state is held by somebody who is about to go: it comes along to hand it over.
            staying += [m for m in holders if m.leaving and m.step == top]
        if self.base.stopping is None and holders and all(m.leaving for m in staying):
            if not self._with_time(staying):
                self._stop_for_lack_of_members([m.name for m in staying])
                return
            staying = self._with_time(staying)
        if not self._enough(staying):
            return
        fitting = self._fitting(staying)
        if self._enough(fitting):
            self._form(fitting, holders, top)

    def _fitting(self, present: list[MemberState]) -> list[MemberState]:
        """Those whose model is the run's; before the first step, that is the one that most have."""
        if not self.base.fingerprint:
            count = Counter(m.fingerprint for m in sorted(present, key=lambda m: m.order))
            self.set(fingerprint=count.most_common(1)[0][0])
            for member in present:
                if member.fingerprint != self.base.fingerprint:
                    self.turn_away(member.name)
        return [m for m in present if m.name in self.members]

    def turn_away(self, name: str) -> None:
        """A member whose model is not the run's cannot take part, and is no loss."""
        member = self.members[name]
        self.ask(
            ev.RejectMember(
                name,
                member.incarnation,
                "S206",
                f"the model of {name} is not the one that this run trains",
                why=difference(self.base.fingerprint, member.fingerprint),
                do="start every member from the same script, with the same model, optimizer, data and batch size",
            )
        )
        self.lose(name, "its model differs", planned=True)

    def _may_come_back(self, member: MemberState) -> bool:
        """Whether a disconnected holder of state is still waited for."""
        return member.status == WAITING and not member.connected and member.step is not None and not member.suspected

    def _holders(self, present: list[MemberState]) -> list[MemberState]:
        fresh = [m for m in present if m.step is not None and not m.stale]
        if fresh:
            return fresh
        stale = [m for m in present if m.step is not None]
        known = self.base.checkpoint_step
        return [m for m in stale if known is None or (m.step or 0) >= known]

    def _restore(self, present: list[MemberState]) -> None:
        if self.base.restoring:
            return
        chosen = min(present, key=lambda m: m.order)
        reason = "no member holds the state of the run any more: going back to the newest checkpoint"
        self.set(restoring=chosen.name)
        self.wait_for(reason)
        self.ask(ev.RestoreCheckpoint(chosen.name, reason))

    def _enough(self, present: list[MemberState]) -> bool:
        rules = self.base.settings
        if self.base.stopping is not None or self.base.done_at is not None:
            return bool(present)
        if len(present) < rules.min_members:
            self.set(regroup_until=None)
            self.wait_for(f"{len(present)} of at least {rules.min_members} members are present")
            return False
        if self.base.started or len(present) >= rules.max_members:
            return True
        if self.base.regroup_until is None:
            self.set(regroup_until=self.now + rules.regroup_s)
        until = self.base.regroup_until
        return until is not None and self.now >= until

    def _form(self, present: list[MemberState], holders: list[MemberState], top: int) -> None:
        fresh = not holders
        names = {m.name for m in holders if m.step == top}
        present = sorted(present, key=lambda m: (m.name not in names, m.rank, m.order))
        chosen = present[: self.base.settings.max_members]
        number = self.base.number + 1
        good = [0] if fresh else [r for r, m in enumerate(chosen) if m.name in names]
        needy = sorted(set(range(len(chosen))) - set(good))
        world = World(
            number=number,
            seats=tuple(Seat(m.name, m.incarnation, m.address, m.speed) for m in chosen),
            step=top,
            fresh=fresh,
            sources=spread(needy, good),
            catching_up=tuple(needy) if not fresh and 2 * len(needy) <= len(chosen) else (),
        )
        joined = sum(1 for m in chosen if m.step is None or m.stale)
        for rank, member in enumerate(chosen):
            self.update(member.name, status=TRAINING, rank=rank, stale=False, suspected=False)
        reason = f"world {number} formed from {len(chosen)} members at step {top}"
        self.set(
            world=world,
            number=number,
            started=True,
            regroup_until=None,
            step=max(self.base.step, top) if not fresh else 0,
            world_began_at=top,
            joins=self.base.joins + joined,
            reason=reason,
        )
        self.ask(ev.FormWorld(world, tuple(m.name for m in chosen), reason))
        self.repeat_stop(m.name for m in chosen)

    def try_propose(self) -> None:
        world = self.base.world
        if world is None or self.base.stopping is not None:
            return
        seated = [self.members[s.member] for s in world.seats if s.member in self.members]
        if any(m.status == DONE for m in seated):
            return
        if not seated:
            # All of them were done with it, and are gone: nobody could hand anything over.
            self.set(world=None, proposal=None)
            self.try_form()
            return
        stay = [m for m in seated if not m.leaving]
        joiners = sorted(
            (
                m
                for m in self.members.values()
                if m.status == WAITING and m.connected and not m.leaving and m.quarantined_until <= self.now
            ),
            key=lambda m: m.order,
        )
        limit = self.base.settings.max_members
        if not stay and not joiners:
            stay = self._with_time(seated)
            if not stay:
                self._stop_for_lack_of_members([m.name for m in seated])
                return
            self.wait_for("every member was told to go: they train on until others come to take over")
            if len(stay) == len(seated):
                return
        elif not stay:
            # Who can stay longest hands over, even if that is one more than there may be.
            limit = max(limit, 2)
            last = sorted(seated, key=lambda m: -m.stop_by)[: max(1, limit - len(joiners))]
            stay = [m for m in seated if m in last]
        target = stay[:limit] + joiners[: max(0, limit - len(stay))]
        if not any(m.leaving for m in target) and len(target) < self.base.settings.min_members:
            return
        self._propose(world, seated, target)

    def _propose(self, world: World, seated: list[MemberState], target: list[MemberState]) -> None:
        names = [m.name for m in target]
        if names == [s.member for s in world.seats]:
            self.set(proposal=None)
            return
        proposal = self.base.proposal
        if proposal is not None and all(seat.member in self.members for seat in proposal.seats):
            return  # one at a time: its members may be crossing already, and hear of the next one there
        number = self.base.number + 1
        seats = world.ranks()
        veterans = [r for r, m in enumerate(target) if m.name in seats]
        needy = [r for r, m in enumerate(target) if m.name not in seats]
        new = World(
            number=number,
            seats=tuple(Seat(m.name, m.incarnation, m.address, m.speed) for m in target),
            step=None,
            sources=spread(needy, veterans),
            catching_up=tuple(needy),
        )
        joining = [target[r].name for r in needy]
        staying = set(names)
        going = [m.name for m in seated if m.name not in staying]
        parts = [f"{join_names(joining)} joins" if joining else "", f"{join_names(going)} leaves" if going else ""]
        causes = [m.leaving for m in seated if m.leaving and m.name not in staying]
        reason = " and ".join(p for p in parts if p) + (f" ({causes[0]})" if causes else "")
        self.set(proposal=new, number=number, repeat_at=self.now + self.base.settings.lease_s)
        to = tuple(dict.fromkeys([s.member for s in world.seats] + names))
        self.ask(ev.ProposeWorld(world.number, new, to, reason))

    def repeat_proposal(self, names: Iterable[str]) -> None:
        """Tell these, as far as they are concerned, of the world that is prepared; whoever knows it ignores that."""
        world, proposal = self.base.world, self.base.proposal
        if world is None or proposal is None:
            return
        concerned = world.ranks().keys() | proposal.ranks().keys()
        to = tuple(n for n in names if n in concerned)
        if to:
            self.ask(ev.ProposeWorld(world.number, proposal, to, "for those who may have missed it", is_new=False))
        self.set(repeat_at=self.now + self.base.settings.lease_s)

    def proposed(self, number: int | None) -> World | None:
        """The proposal, if it has this number: members may have crossed into it."""
        proposal = self.base.proposal
        return proposal if proposal is not None and proposal.number == number else None

    def enter(self, proposal: World, step: int) -> None:
        """The proposed world is live, because one of its members has crossed over."""
        before, ranks = self.base.world, proposal.ranks()
        for rank, seat in enumerate(proposal.seats):
            if seat.member in self.members and self.members[seat.member].status != DONE:
                self.update(seat.member, status=TRAINING, rank=rank, stale=False)
        for seat in before.seats if before is not None else ():
            if seat.member in self.members and seat.member not in ranks:
                self.update(seat.member, status=WAITING, step=step, stale=True)
        reason = f"world {proposal.number} with {proposal.size} members from step {step}"
        self.set(
            world=replace(proposal, step=step),
            proposal=None,
            step=max(self.base.step, step),
            world_began_at=step,
            joins=self.base.joins + len(proposal.sources),
            reason=reason,
        )
        self.ask(ev.MembershipNote(reason))

    # --- stopping

    def _with_time(self, leaving: list[MemberState]) -> list[MemberState]:
        """Those who were told to go, but can wait for somebody who is hired to take over."""
        return [m for m in leaving if self.base.settings.replaces_members and m.stop_by > self.now]

    def _stop_for_lack_of_members(self, names: list[str]) -> None:
        cause = next((self.members[n].leaving for n in names if self.members[n].leaving), "all members leave")
        reason = f"every member was told to go: {cause}"
        self.stop(
            ev.StopRequested(
                reason,
                checkpoint=True,
                exit_code=exit_codes.RESUMABLE,
                until_replaced=self.base.settings.replaces_members,
            )
        )

    def stop(self, asked: ev.StopRequested) -> None:
        if self.base.stopping is None:
            self.set(stopping=asked, reason=asked.reason)
            self.repeat_stop(self.members)

    def repeat_stop(self, names: Iterable[str]) -> None:
        asked = self.base.stopping
        to = tuple(names)
        if asked is not None and to:
            self.ask(ev.StopMembers(to, asked.reason, asked.checkpoint, asked.exit_code))

    def remind(self, member: MemberState) -> None:
        """Tell one that comes, for the first time or again, of the end: it may not have heard of it."""
        self.repeat_stop([member.name])
        if self.base.finished:
            self.ask(ev.AnnounceFinished((member.name,), self.base.step))

    # --- claims

    def pass_claims_on(self, gone: str) -> None:
        for name, claim in self.claims.items():
            waiting = tuple(w for w in claim.waiting if w != gone)
            if claim.holder == gone and not claim.completed:
                heir = waiting[0] if waiting else ""
                self.claims[name] = replace(claim, holder=heir, waiting=waiting[1:])
                if heir:
                    self.ask(ev.GrantClaim(heir, name))
            else:
                self.claims[name] = replace(claim, waiting=waiting)


def join_names(names: Iterable[str]) -> str:
    """Names for a sentence; of very many, the first few."""
    found = list(names)
    if len(found) <= MANY:
        return ", ".join(found)
    return f"{', '.join(found[:FEW])} and {len(found) - FEW} others"


def spread(needy: list[int], good: list[int]) -> dict[int, int]:
    """Each rank in need gets a source, in turn."""
    return {rank: good[i % len(good)] for i, rank in enumerate(needy)} if good else {}


def difference(ours: str, theirs: str) -> str:
    """Fingerprints are `hash` or `key=value;…`; names the first keys that differ."""
    left = dict(part.split("=", 1) for part in ours.split(";") if "=" in part)
    right = dict(part.split("=", 1) for part in theirs.split(";") if "=" in part)
    keys = [k for k in (left | right) if left.get(k) != right.get(k)]
    shown = [f"{k}: {left.get(k, 'nothing')} in the run, {right.get(k, 'nothing')} here" for k in keys[:3]]
    return "; ".join(shown) or "the fingerprints differ"
