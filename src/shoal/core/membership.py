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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.core import events as ev
from shoal.core.world import Address, Seat, World

STARTING, WAITING, TRAINING, OUT, DONE = "starting", "waiting", "training", "out", "done"


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that membership depends on."""

    min_members: int = 1
    max_members: int = 1
    lease_s: float = 3.0
    reconnect_s: float = 1.0
    gather_s: float = 0.5
    stall_s: float = 300.0
    bench_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of one member. `step` is the state that it holds outside a world, None for none."""

    name: str
    incarnation: str
    address: Address
    status: str
    order: int
    since: float
    step: int | None = None
    stale: bool = False
    connected: bool = True
    away_since: float | None = None
    leaving: str = ""
    suspected: bool = False
    strikes: int = 0
    benched_until: float = 0.0
    rank: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that exactly one member does."""

    holder: str
    waiting: tuple[str, ...] = ()
    fulfilled: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """The membership of one run."""

    rules: Rules
    members: Mapping[str, Member] = field(default_factory=dict)
    world: World | None = None
    proposal: World | None = None
    number: int = 0
    order: int = 0
    started: bool = False
    fingerprint: str = ""
    restoring: str = ""
    gather_until: float | None = None
    claims: Mapping[str, Claim] = field(default_factory=dict)
    stopping: ev.StopAsked | None = None
    finished: bool = False
    step: int = 0
    world_began_at: int = 0
    checkpoint_step: int | None = None
    checkpoint_path: str = ""
    losses: int = 0
    joins: int = 0
    reason: str = "waiting for the first member"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a member last said of itself, and when."""

    at: float
    world: int | None = None
    step: int | None = None
    phase: str = ""
    phase_age_s: float = 0.0
    usual_step_s: float = 0.0


def decide(state: State, event: ev.Event, now: float) -> tuple[State, tuple[ev.Instruction, ...]]:
    """The next state, and what to tell whom."""
    draft = _Draft(state, now)
    handler = _HANDLERS[type(event)]
    handler(draft, event)
    draft.advance()
    return draft.freeze(), tuple(draft.asked)


def due(state: State, beats: Mapping[str, Beat], now: float) -> tuple[ev.Event, ...]:
    """The waits that are over, as events."""
    if state.finished:
        return ()
    fired: list[ev.Event] = []
    for member in state.members.values():
        reason = _why_lost(state, member, beats.get(member.name), now)
        if reason:
            fired.append(ev.Lost(member.name, reason))
    fired.extend(ev.Lost(name, reason) for name, reason in _stalled(state, beats, now))
    if state.gather_until is not None and now >= state.gather_until:
        fired.append(ev.TimerFired("gather"))
    elif any(0.0 < m.benched_until <= now for m in state.members.values()):
        fired.append(ev.TimerFired("bench"))
    return tuple(fired)


def _why_lost(state: State, member: Member, beat: Beat | None, now: float) -> str:
    silent_s = now - max(beat.at if beat else 0.0, member.since)
    if silent_s > state.rules.lease_s:
        return f"its lease ran out: silent for {silent_s:.1f} s"
    away_s = now - member.away_since if member.away_since is not None else 0.0
    if member.status in (OUT, WAITING, STARTING) and away_s > state.rules.reconnect_s:
        return f"it did not come back within {state.rules.reconnect_s:g} s"
    return ""


def _stalled(state: State, beats: Mapping[str, Beat], now: float) -> list[tuple[str, str]]:
    """Members that are stuck outside the exchange while all others have long waited for them in it."""
    if state.world is None:
        return []
    seen = {s.member: beats[s.member] for s in state.world.seats if s.member in beats}
    waiting = {n: b for n, b in seen.items() if b.phase == "exchange"}
    stuck = {n: b for n, b in seen.items() if b.phase != "exchange"}
    if not waiting or not stuck or len(seen) < state.world.size:
        return []
    limit_s = max(state.rules.stall_s, 20.0 * max(b.usual_step_s for b in seen.values()))
    if min(b.phase_age_s for b in waiting.values()) < limit_s:
        return []
    return [
        (name, f"it has been in {beat.phase or 'an unknown phase'} for {beat.phase_age_s:.0f} s while the others wait")
        for name, beat in stuck.items()
        if beat.phase_age_s >= limit_s and now - beat.at < state.rules.lease_s
    ]


class _Draft:
    """A state under change; it lives for one event."""

    def __init__(self, state: State, now: float) -> None:
        self.base = state
        self.now = now
        self.members = dict(state.members)
        self.claims = dict(state.claims)
        self.asked: list[ev.Instruction] = []

    def freeze(self) -> State:
        return replace(self.base, members=self.members, claims=self.claims)

    def set(self, **changes: object) -> None:
        self.base = replace(self.base, **changes)  # type: ignore[arg-type]

    def ask(self, instruction: ev.Instruction) -> None:
        self.asked.append(instruction)

    def wait_for(self, reason: str) -> None:
        if reason != self.base.reason:
            self.set(reason=reason)
            self.ask(ev.Say(reason))

    def update(self, name: str, **changes: object) -> Member:
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
            self.ask(ev.Say(f"{name} is lost: {reason}", member=name))
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
        concerned = {seat.member for seat in world.seats}
        if proposal is not None:
            concerned |= {seat.member for seat in proposal.seats}
        for name in concerned & self.members.keys():
            member = self.members[name]
            if member.status == TRAINING:
                self.update(name, status=OUT, rank=world.rank_of(name) or 0)
        tell = tuple(n for n in sorted(concerned & self.members.keys()) if self.members[n].status == OUT)
        self.set(world=None, proposal=None)
        self.ask(ev.DissolveWorld(last, tell, reason))

    def answered(self, name: str, step: int | None) -> None:
        progress = (step or 0) > self.base.world_began_at
        self.update(name, status=WAITING, step=step, stale=False, strikes=0 if progress else self.members[name].strikes)
        self.set(step=max(self.base.step, step or 0))

    # --- moving on

    def advance(self) -> None:
        if self.base.finished:
            return
        if self.base.world is None:
            self.try_form()
        else:
            self.try_propose()

    def try_form(self) -> None:
        held_up = [m.name for m in self.members.values() if m.status == OUT or self._may_come_back(m)]
        if held_up:
            self.wait_for(f"waiting for {_names(held_up)} to answer")
            return
        able = [m for m in self.members.values() if m.status == WAITING and m.connected]
        present = [m for m in able if m.benched_until <= self.now]
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
        if not any(m.step == top for m in staying if m in holders) and holders:
            # The only state is held by somebody who is about to go: it comes along to hand it over.
            staying += [m for m in holders if m.leaving and m.step == top]
        if self.base.stopping is None and holders and all(m.leaving for m in staying):
            self._stop_for_lack_of_members([m.name for m in staying])
            return
        if not self._enough(staying):
            return
        self._form(staying, holders, top)

    def _may_come_back(self, member: Member) -> bool:
        """Whether a disconnected holder of state is still waited for."""
        return member.status == WAITING and not member.connected and member.step is not None and not member.suspected

    def _holders(self, present: list[Member]) -> list[Member]:
        fresh = [m for m in present if m.step is not None and not m.stale]
        if fresh:
            return fresh
        stale = [m for m in present if m.step is not None]
        known = self.base.checkpoint_step
        return [m for m in stale if known is None or (m.step or 0) >= known]

    def _restore(self, present: list[Member]) -> None:
        if self.base.restoring:
            return
        chosen = min(present, key=lambda m: m.order)
        reason = "no member holds the state of the run any more: going back to the newest checkpoint"
        self.set(restoring=chosen.name)
        self.wait_for(reason)
        self.ask(ev.AskRestore(chosen.name, reason))

    def _enough(self, present: list[Member]) -> bool:
        rules = self.base.rules
        if self.base.stopping is not None:
            return bool(present)
        if len(present) < rules.min_members:
            self.set(gather_until=None)
            self.wait_for(f"{len(present)} of at least {rules.min_members} members are present")
            return False
        if self.base.started or len(present) >= rules.max_members:
            return True
        if self.base.gather_until is None:
            self.set(gather_until=self.now + rules.gather_s)
        until = self.base.gather_until
        return until is not None and self.now >= until

    def _form(self, present: list[Member], holders: list[Member], top: int) -> None:
        fresh = not holders
        names = {m.name for m in holders if m.step == top}
        present = sorted(present, key=lambda m: (m.name not in names, m.rank, m.order))
        chosen = present[: self.base.rules.max_members]
        number = self.base.number + 1
        good = [0] if fresh else [r for r, m in enumerate(chosen) if m.name in names]
        needy = [r for r in range(len(chosen)) if r not in good]
        world = World(
            number=number,
            seats=tuple(Seat(m.name, m.incarnation, m.address) for m in chosen),
            step=top,
            fresh=fresh,
            sources=_spread(needy, good),
            ghosts=tuple(needy) if not fresh and 2 * len(needy) <= len(chosen) else (),
        )
        joined = sum(1 for m in chosen if m.step is None or m.stale)
        for rank, member in enumerate(chosen):
            self.update(member.name, status=TRAINING, rank=rank, stale=False, suspected=False)
        reason = f"world {number} formed from {len(chosen)} members at step {top}"
        self.set(
            world=world,
            number=number,
            started=True,
            gather_until=None,
            step=max(self.base.step, top) if not fresh else 0,
            world_began_at=top,
            joins=self.base.joins + joined,
            reason=reason,
        )
        self.ask(ev.FormWorld(world, tuple(m.name for m in chosen), reason))
        self._repeat_stop(m.name for m in chosen)

    def try_propose(self) -> None:
        world = self.base.world
        if world is None or self.base.stopping is not None:
            return
        seated = [self.members[s.member] for s in world.seats if s.member in self.members]
        if any(m.status == DONE for m in seated):
            return
        stay = [m for m in seated if not m.leaving]
        joiners = sorted(
            (
                m
                for m in self.members.values()
                if m.status == WAITING and m.connected and not m.leaving and m.benched_until <= self.now
            ),
            key=lambda m: m.order,
        )
        if not stay and not joiners:
            self._stop_for_lack_of_members([m.name for m in seated])
            return
        if not stay:
            stay = seated
        limit = self.base.rules.max_members
        target = stay[:limit] + joiners[: max(0, limit - len(stay))]
        if not any(m.leaving for m in target) and len(target) < self.base.rules.min_members:
            return
        self._propose(world, seated, target)

    def _propose(self, world: World, seated: list[Member], target: list[Member]) -> None:
        names = [m.name for m in target]
        if names == [s.member for s in world.seats]:
            self.set(proposal=None)
            return
        proposal = self.base.proposal
        if proposal is not None and names == [s.member for s in proposal.seats]:
            return
        number = self.base.number + 1
        veterans = [r for r, m in enumerate(target) if world.rank_of(m.name) is not None]
        needy = [r for r in range(len(target)) if r not in veterans]
        new = World(
            number=number,
            seats=tuple(Seat(m.name, m.incarnation, m.address) for m in target),
            step=None,
            sources=_spread(needy, veterans),
            ghosts=tuple(needy),
        )
        joining = [target[r].name for r in needy]
        going = [m.name for m in seated if m.name not in names]
        parts = [f"{_names(joining)} joins" if joining else "", f"{_names(going)} leaves" if going else ""]
        causes = [m.leaving for m in seated if m.leaving and m.name in going]
        reason = " and ".join(p for p in parts if p) + (f" ({causes[0]})" if causes else "")
        self.set(proposal=new, number=number)
        to = tuple(dict.fromkeys([s.member for s in world.seats] + names))
        self.ask(ev.ProposeWorld(world.number, new, to, reason))

    def enter(self, proposal: World, step: int) -> None:
        """The proposed world is live, because one of its members has crossed over."""
        before = self.base.world
        for rank, seat in enumerate(proposal.seats):
            if seat.member in self.members:
                self.update(seat.member, status=TRAINING, rank=rank, stale=False)
        for seat in before.seats if before is not None else ():
            if seat.member in self.members and proposal.rank_of(seat.member) is None:
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
        self.ask(ev.Say(reason))

    # --- stopping

    def _stop_for_lack_of_members(self, names: list[str]) -> None:
        cause = next((self.members[n].leaving for n in names if self.members[n].leaving), "all members leave")
        self.stop(ev.StopAsked(f"every member was told to go: {cause}", checkpoint=True, exit_code=75))

    def stop(self, asked: ev.StopAsked) -> None:
        if self.base.stopping is None:
            self.set(stopping=asked, reason=asked.reason)
            self._repeat_stop(self.members)

    def _repeat_stop(self, names: Iterable[str]) -> None:
        asked = self.base.stopping
        to = tuple(names)
        if asked is not None and to:
            self.ask(ev.StopMembers(to, asked.reason, asked.checkpoint, asked.exit_code))

    # --- claims

    def pass_claims_on(self, gone: str) -> None:
        for name, claim in self.claims.items():
            waiting = tuple(w for w in claim.waiting if w != gone)
            if claim.holder == gone and not claim.fulfilled:
                heir = waiting[0] if waiting else ""
                self.claims[name] = replace(claim, holder=heir, waiting=waiting[1:])
                if heir:
                    self.ask(ev.Grant(heir, name))
            else:
                self.claims[name] = replace(claim, waiting=waiting)


def _on_hello(draft: _Draft, event: ev.Hello) -> None:
    known = draft.members.get(event.member)
    if known is not None and known.incarnation != event.incarnation:
        if known.connected:
            draft.ask(
                ev.Refuse(
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
        draft.members[event.member] = Member(
            name=event.member,
            incarnation=event.incarnation,
            address=event.address,
            status=STARTING,
            order=draft.base.order,
            since=draft.now,
            step=event.step,
            stale=event.step is not None,
        )
        if event.world is not None:
            draft.ask(ev.Expel(event.member, "it is not in the run any more"))
        if draft.base.stopping is not None:
            draft._repeat_stop([event.member])
        if draft.base.finished:
            draft.ask(ev.TellFinished((event.member,), draft.base.step))
        return
    draft.update(event.member, connected=True, away_since=None, suspected=False, address=event.address)
    _find_place(draft, known, event)


def _find_place(draft: _Draft, known: Member, event: ev.Hello) -> None:
    """Puts a member that found the coordinator again where it says it is."""
    world, proposal = draft.base.world, draft.base.proposal
    if event.done and event.step is not None:
        _on_done(draft, ev.MemberDone(event.member, event.step))
    elif event.broken and event.world is not None:
        if proposal is not None and event.world == proposal.number and event.step is not None:
            draft.enter(proposal, event.step)
        _on_broke(draft, ev.WorldBroke(event.member, event.world, event.step))
    elif proposal is not None and event.world == proposal.number and event.step is not None:
        draft.enter(proposal, event.step)
    elif world is not None and world.rank_of(event.member) is not None and event.world != world.number:
        draft.ask(ev.FormWorld(world, (event.member,), "it missed the news of this world"))
    elif known.status == OUT:
        draft.ask(ev.DissolveWorld(draft.base.number, (event.member,), "the world ended while it was away"))


def _on_ready(draft: _Draft, event: ev.BecameReady) -> None:
    member = draft.members.get(event.member)
    if member is None or member.status == TRAINING:
        return
    if not draft.base.fingerprint:
        draft.set(fingerprint=event.fingerprint)
    elif draft.base.fingerprint != event.fingerprint:
        draft.ask(
            ev.Refuse(
                member.name,
                member.incarnation,
                "S206",
                f"the model of {member.name} is not the one that this run trains",
                why=_difference(draft.base.fingerprint, event.fingerprint),
                do="start every member from the same script, with the same model, optimizer, data and batch size",
            )
        )
        draft.lose(member.name, "its model differs", planned=True)
        return
    if event.restored:
        if draft.base.restoring == member.name:
            draft.set(restoring="")
        if event.step is None:
            draft.set(started=False, step=0)
            draft.ask(ev.Say(f"there is no checkpoint: training starts over, {draft.base.step} steps are done again"))
        else:
            draft.ask(ev.Say(f"{member.name} restored the checkpoint of step {event.step}"))
    stale = member.stale and not event.restored
    draft.update(member.name, status=WAITING, step=event.step, stale=stale and event.step is not None)
    if not draft.base.started and draft.base.gather_until is not None:
        draft.set(gather_until=draft.now + draft.base.rules.gather_s)


def _difference(ours: str, theirs: str) -> str:
    """Fingerprints are `hash` or `key=value;…`; names the first keys that differ."""
    left = dict(part.split("=", 1) for part in ours.split(";") if "=" in part)
    right = dict(part.split("=", 1) for part in theirs.split(";") if "=" in part)
    keys = [k for k in (left | right) if left.get(k) != right.get(k)]
    shown = [f"{k}: {left.get(k, 'nothing')} in the run, {right.get(k, 'nothing')} here" for k in keys[:3]]
    return "; ".join(shown) or "the fingerprints differ"


def _on_broke(draft: _Draft, event: ev.WorldBroke) -> None:
    member = draft.members.get(event.member)
    if member is None:
        return
    world, proposal = draft.base.world, draft.base.proposal
    if proposal is not None and event.world == proposal.number:
        _on_preparation_failed(draft, ev.PreparationFailed(event.member, event.world, event.suspects, event.cause))
        return
    live = world is not None and event.world == world.number
    if member.status in (OUT, TRAINING, WAITING) and (live or event.world >= _last_world(draft, event)):
        draft.answered(event.member, event.step)
    if live:
        _strike(draft, event)
        who = f" with {_names(event.suspects)}" if event.suspects else ""
        draft.dissolve(f"{event.member} lost touch{who}" + (f": {event.cause}" if event.cause else ""))
    _drop_the_suspected(draft)


def _strike(draft: _Draft, event: ev.WorldBroke) -> None:
    """Suspects of a world that never took a step sit out for a while, longer each time."""
    no_progress = (event.step or 0) <= draft.base.world_began_at
    for name in event.suspects:
        if name in draft.members and name != event.member:
            suspect = draft.update(name, suspected=True)
            if no_progress:
                strikes = suspect.strikes + 1
                bench = draft.now + draft.base.rules.bench_s * strikes if strikes > 1 else 0.0
                draft.update(name, strikes=strikes, benched_until=bench)


def _last_world(draft: _Draft, event: ev.WorldBroke) -> int:
    """An answer about an older world says nothing about a newer one that the member was told to enter."""
    world = draft.base.world
    in_newer = world is not None and world.rank_of(event.member) is not None
    return world.number if in_newer and world is not None else 0


def _drop_the_suspected(draft: _Draft) -> None:
    """A member that is both disconnected and suspected by a peer is gone; nobody waits for its lease."""
    for name in [m.name for m in draft.members.values() if m.suspected and not m.connected and m.status == OUT]:
        draft.lose(name, "its connections to the coordinator and to a peer both broke")


def _on_entered(draft: _Draft, event: ev.EnteredWorld) -> None:
    proposal, world = draft.base.proposal, draft.base.world
    if event.member not in draft.members:
        return
    if proposal is not None and event.world == proposal.number:
        draft.enter(proposal, event.step)
    elif world is None or event.world != world.number:
        draft.dissolve(f"{event.member} entered world {event.world}, which is not the live one")
        if draft.members[event.member].status == OUT or world is None:
            draft.ask(ev.DissolveWorld(max(event.world, draft.base.number), (event.member,), "that world is over"))


def _on_preparation_failed(draft: _Draft, event: ev.PreparationFailed) -> None:
    proposal, world = draft.base.proposal, draft.base.world
    if proposal is None or event.world != proposal.number:
        return
    draft.set(proposal=None)
    for name in event.suspects:
        member = draft.members.get(name)
        if member is not None and (world is None or world.rank_of(name) is None):
            strikes = member.strikes + 1
            draft.update(name, strikes=strikes, benched_until=draft.now + draft.base.rules.bench_s * strikes)
    draft.ask(ev.Say(f"world {event.world} could not be prepared by {event.member}: {event.cause}", event.member))
    if not any(n in draft.members for n in event.suspects):
        # Nobody to blame: propose again only when something changes, or after a breath.
        for seat in proposal.seats:
            joiner = draft.members.get(seat.member)
            if joiner is not None and joiner.status == WAITING:
                draft.update(seat.member, benched_until=draft.now + draft.base.rules.bench_s)


def _on_disconnected(draft: _Draft, event: ev.Disconnected) -> None:
    if event.member in draft.members:
        draft.update(event.member, connected=False, away_since=draft.now)
        _drop_the_suspected(draft)


def _on_lost(draft: _Draft, event: ev.Lost) -> None:
    known = draft.members.get(event.member)
    if known is not None and known.connected:
        draft.ask(ev.Expel(event.member, event.reason))
    draft.lose(event.member, event.reason)


def _on_notice(draft: _Draft, event: ev.NoticeGiven) -> None:
    if event.member in draft.members and not draft.members[event.member].leaving:
        draft.update(event.member, leaving=event.cause)
        draft.ask(ev.Say(f"{event.member} will leave within {event.within_s:.0f} s: {event.cause}", event.member))


def _on_left(draft: _Draft, event: ev.MemberLeft) -> None:
    if event.member in draft.members:
        world, proposal = draft.base.world, draft.base.proposal
        inside = world is not None and world.rank_of(event.member) is not None
        if inside and proposal is not None and proposal.rank_of(event.member) is None and event.step is not None:
            # It goes only when all have agreed to cross, even if nobody has told us yet.
            draft.enter(proposal, event.step)
        draft.ask(ev.Say(f"{event.member} has left", member=event.member))
        draft.lose(event.member, "it left", planned=True)


def _on_done(draft: _Draft, event: ev.MemberDone) -> None:
    if event.member not in draft.members:
        return
    draft.update(event.member, status=DONE, step=event.step)
    draft.set(step=max(draft.base.step, event.step))
    world = draft.base.world
    seated = {s.member for s in world.seats} if world is not None else set()
    training = [m for m in draft.members.values() if m.status in (TRAINING, OUT)]
    behind = [m for m in draft.members.values() if m.status == WAITING and m.step is not None and not m.stale]
    if any(m.name in seated or m.status == OUT for m in training) or behind:
        return
    others = tuple(m.name for m in draft.members.values() if m.status != DONE)
    draft.set(finished=True, world=None, proposal=None, reason=f"finished at step {event.step}")
    draft.ask(ev.TellFinished(others, event.step))


def _on_claimed(draft: _Draft, event: ev.Claimed) -> None:
    claim = draft.claims.get(event.name)
    if claim is None or not claim.holder:
        if claim is not None and claim.fulfilled:
            draft.ask(ev.TellFulfilled((event.member,), event.name))
            return
        draft.claims[event.name] = Claim(event.member)
        draft.ask(ev.Grant(event.member, event.name))
    elif claim.fulfilled:
        draft.ask(ev.TellFulfilled((event.member,), event.name))
    elif claim.holder == event.member:
        draft.ask(ev.Grant(event.member, event.name))
    elif event.member not in claim.waiting:
        draft.claims[event.name] = replace(claim, waiting=(*claim.waiting, event.member))


def _on_fulfilled(draft: _Draft, event: ev.ClaimFulfilled) -> None:
    claim = draft.claims.get(event.name)
    if claim is not None and claim.holder == event.member:
        draft.claims[event.name] = replace(claim, waiting=(), fulfilled=True)
        if claim.waiting:
            draft.ask(ev.TellFulfilled(claim.waiting, event.name))


def _on_checkpoint(draft: _Draft, event: ev.CheckpointWritten) -> None:
    if draft.base.checkpoint_step is None or event.step >= draft.base.checkpoint_step:
        draft.set(checkpoint_step=event.step, checkpoint_path=event.path)


def _on_progress(draft: _Draft, event: ev.Progressed) -> None:
    draft.set(step=max(draft.base.step, event.step))


def _on_stop(draft: _Draft, event: ev.StopAsked) -> None:
    draft.stop(event)


def _on_scale(draft: _Draft, event: ev.ScaleAsked) -> None:
    rules = replace(draft.base.rules, min_members=event.min_members, max_members=event.max_members)
    draft.set(rules=rules)
    draft.ask(ev.Say(f"scaled to {event.min_members}:{event.max_members} members"))


def _on_timer(draft: _Draft, event: ev.TimerFired) -> None:
    if event.what == "gather" and not any(m.status == WAITING and m.connected for m in draft.members.values()):
        # Whoever was gathered for is gone; the next to become ready starts the wait anew.
        draft.set(gather_until=None)
    if event.what == "bench":
        for name in [m.name for m in draft.members.values() if 0.0 < m.benched_until <= draft.now]:
            draft.update(name, benched_until=0.0)


def _on_restart(draft: _Draft, _event: ev.CoordinatorRestarted) -> None:
    # Every lease starts anew: silence while nobody listened is no silence.
    for name in list(draft.members):
        grace = draft.base.rules.lease_s
        draft.update(name, connected=False, away_since=draft.now + grace, since=draft.now, suspected=False)
    draft.ask(ev.Say("the coordinator is back and has read its journal"))


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def _spread(needy: list[int], good: list[int]) -> dict[int, int]:
    """Each rank in need gets a source, in turn."""
    return {rank: good[i % len(good)] for i, rank in enumerate(needy)} if good else {}


_HANDLERS: dict[type, Callable[[_Draft, Any], None]] = {
    ev.Hello: _on_hello,
    ev.BecameReady: _on_ready,
    ev.WorldBroke: _on_broke,
    ev.EnteredWorld: _on_entered,
    ev.PreparationFailed: _on_preparation_failed,
    ev.Disconnected: _on_disconnected,
    ev.Lost: _on_lost,
    ev.NoticeGiven: _on_notice,
    ev.MemberLeft: _on_left,
    ev.MemberDone: _on_done,
    ev.Claimed: _on_claimed,
    ev.ClaimFulfilled: _on_fulfilled,
    ev.CheckpointWritten: _on_checkpoint,
    ev.Progressed: _on_progress,
    ev.StopAsked: _on_stop,
    ev.ScaleAsked: _on_scale,
    ev.TimerFired: _on_timer,
    ev.CoordinatorRestarted: _on_restart,
}
