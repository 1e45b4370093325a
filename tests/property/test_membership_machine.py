"""Members join, leave, hang, die and lose the coordinator in any order; the promises of membership hold all the while.

Members are modelled after `shoal.worker.session.session`: messages travel in order on each line, but lines are
delivered in any order. The only clock is the one that the rules advance. In a calm example members join, die and get
notices, but every message is delivered at once: few examples would otherwise reach the end of a run.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.core.membership import events as ev
from shoal.core.membership.decide import LastHeartbeat, MembershipSettings, MembershipState, decide, due
from shoal.core.world import Address, World

SETTINGS = MembershipSettings(min_members=1, max_members=3, regroup_s=0.5)
FOR_EVER = 10_000


@dataclasses.dataclass
class Model:
    """A member as its session behaves."""

    name: str
    incarnation: str
    alive: bool = True
    hung: bool = False
    connected: bool = True
    world: World | None = None
    broken: bool = False
    step: int | None = None
    formed: World | None = None
    joins_after: int | None = None
    prepared: World | None = None
    over_up_to: int = 0
    leaving: bool = False
    done: bool = False
    early: bool = False
    end_at: int = FOR_EVER
    inbox: deque[Any] = dataclasses.field(default_factory=deque)
    outbox: deque[Any] = dataclasses.field(default_factory=deque)

    @property
    def works(self) -> bool:
        return self.alive and not self.hung

    def send(self, event: Any) -> None:
        if self.connected:
            self.outbox.append(event)

    def hello(self) -> None:
        self.send(
            ev.MemberConnected(
                self.name,
                self.incarnation,
                Address("h", 1),
                self.world.number if self.world else None,
                self.step,
                self.broken,
                done=self.done,
                early=self.early,
            )
        )
        if self.world is None:
            self.send(ev.MemberReady(self.name, "f", self.step))
        if self.leaving:
            self.send(ev.NoticeReceived(self.name, 30.0, "notice"))

    def break_world(self, suspects: tuple[str, ...] = (), answer: bool = True, dissolved: bool = False) -> None:
        """Break the world; a member that is done does so only if the coordinator has dissolved the world."""
        if self.world is not None and not self.broken and (dissolved or not self.done):
            self.broken, self.prepared = True, None
            if answer:
                self.send(ev.WorldBroken(self.name, self.world.number, self.step, suspects))


class Membership(RuleBasedStateMachine):
    @initialize(
        count=st.integers(1, 4),
        replaces_members=st.booleans(),
        remaining=st.sampled_from([1, 2, 9, FOR_EVER]),
        begun=st.booleans(),
        calm=st.booleans(),
    )
    def begin(self, count: int, replaces_members: bool, remaining: int, begun: bool, calm: bool) -> None:
        self.calm = calm
        self.now = 1000.0
        self.total = remaining
        self.ended = False
        self.state = self.first = MembershipState(dataclasses.replace(SETTINGS, replaces_members=replaces_members))
        self.journal: list[tuple[Any, float]] = []
        self.models: dict[str, Model] = {}
        self.names = 0
        self.down = False
        self.checkpoint: int | None = None
        self.committed = 0
        for _ in range(count + (2 if calm else 0)):
            self._join()
        if begun or calm:
            # Most faults at the end of a run need a world that trains, and few examples get that far by themselves.
            self.total = FOR_EVER
            while self.committed < 2:
                self._let_settle()
            self.total = self.committed + (min(remaining, 3) if calm else remaining)

    # --- what may happen

    def _join(self) -> None:
        self.names += 1
        model = Model(f"m{self.names}", f"i{self.names}", connected=not self.down)
        self.models[model.name] = model
        model.hello()

    @precondition(lambda self: sum(m.alive for m in self.models.values()) < 5)
    @rule()
    def member_joins(self) -> None:
        self._join()

    @precondition(lambda self: not self.calm)
    @rule(data=st.data())
    def some_messages_arrive(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 6))):
            lines = [(m, way) for m in self.models.values() for way in ("out", "in") if self._can_deliver(m, way)]
            if not lines:
                return
            self._deliver(*data.draw(st.sampled_from(lines)))

    @rule()
    def all_messages_arrive_and_a_step_commits(self) -> None:
        self._deliver_all()
        world = self._complete_world()
        if world is not None:
            self._step(world, [self.models[s.member] for s in world.seats])
            self._deliver_all()

    @rule(data=st.data())
    def member_dies_and_all_messages_arrive(self, data: st.DataObject) -> None:
        victim = self._pick(data, self._is_in_complete_world)
        if victim is not None and victim.world is not None:
            victim.alive = victim.connected = False
            self._feed(ev.MemberLost(victim.name, "its process ended"), victim)
            for seat in victim.world.seats:
                self.models[seat.member].break_world((victim.name,))
            self._deliver_all()

    @precondition(lambda self: not self.calm)
    @rule(data=st.data())
    def member_is_killed(self, data: st.DataObject) -> None:
        victim = self._pick(data, lambda m: m.alive)
        if victim is not None:
            victim.alive, victim.connected = False, False
            self._feed(ev.MemberDisconnected(victim.name), victim)
            if data.draw(st.booleans()):
                self._feed(ev.MemberLost(victim.name, "its process ended"), victim)

    @rule(data=st.data())
    def finished_member_exits(self, data: st.DataObject) -> None:
        model = self._pick(data, lambda m: m.alive and m.done and not m.outbox)
        if model is not None:
            model.alive = model.connected = False
            self._feed(ev.MemberDisconnected(model.name), model)

    @precondition(lambda self: not self.calm)
    @rule(data=st.data())
    def member_leaves_the_loop(self, data: st.DataObject) -> None:
        """Let the script of one member break out of its loop: the training ends there for all."""
        model = self._pick(data, lambda m: m.works and not m.done and not m.leaving and self._is_in_complete_world(m))
        if model is not None and data.draw(st.integers(0, 3)) == 0:
            model.done = model.early = True
            model.send(ev.MemberDone(model.name, model.step or 0, early=True))

    @precondition(lambda self: not self.calm)
    @rule(data=st.data())
    def member_hangs(self, data: st.DataObject) -> None:
        victim = self._pick(data, lambda m: m.works)
        if victim is not None:
            victim.hung = True

    @precondition(lambda self: not self.calm)
    @rule(data=st.data())
    def member_wakes_up(self, data: st.DataObject) -> None:
        sleeper = self._pick(data, lambda m: m.alive and m.hung)
        if sleeper is not None:
            sleeper.hung = False
            self._resume_connecting(sleeper)

    @precondition(lambda self: not self.calm)
    @rule(data=st.data())
    def connection_is_lost(self, data: st.DataObject) -> None:
        victim = self._pick(data, lambda m: m.works and m.connected)
        if victim is not None:
            self._cut(victim)
            self._feed(ev.MemberDisconnected(victim.name), victim)

    @rule(data=st.data())
    def member_gets_notice(self, data: st.DataObject) -> None:
        victim = self._pick(data, lambda m: m.works and not m.leaving and not m.done)
        if victim is not None and (self.state.settings.replaces_members or self._others_can_continue(victim)):
            victim.leaving = True
            victim.send(ev.NoticeReceived(victim.name, 30.0, "notice"))

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.5, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self._pass_time(seconds)

    @precondition(lambda self: not self.calm)
    @rule(data=st.data())
    def world_trains_a_step(self, data: st.DataObject) -> None:
        """Train one step of a complete world; sometimes a member dies in it, and only some others commit."""
        world = self._complete_world()
        if world is None:
            return
        seats = [self.models[s.member] for s in world.seats]
        committing = list(seats)
        if len(seats) > 1 and data.draw(st.integers(0, 4)) == 0:
            victim = data.draw(st.sampled_from(seats))
            others = [m for m in seats if m is not victim]
            committing = [m for m in others if data.draw(st.booleans())]
            victim.alive = victim.connected = False
            self._feed(ev.MemberDisconnected(victim.name), victim)
            self._step(world, committing)
            for model in others:
                if model not in committing:
                    model.break_world((victim.name,))
        else:
            self._step(world, committing)

    @precondition(lambda self: not self.calm)
    @rule(data=st.data())
    def member_detects_a_broken_ring(self, data: st.DataObject) -> None:
        model = self._pick(data, lambda m: m.works and m.world is not None and not m.broken and self._ring_is_broken(m))
        if model is not None:
            assert model.world is not None
            suspects = tuple(s.member for s in model.world.seats if not self.models[s.member].alive)
            model.break_world(suspects[:1])

    @precondition(lambda self: not self.down and not self.calm)
    @rule()
    def coordinator_dies(self) -> None:
        self.down = True
        for model in self.models.values():
            self._cut(model)

    @precondition(lambda self: self.down)
    @rule()
    def coordinator_restarts(self) -> None:
        self._restart_coordinator()

    # --- what must hold

    @invariant()
    def at_most_one_world_is_complete(self) -> None:
        if hasattr(self, "models"):
            complete = {m.world.number for m in self.models.values() if self._is_in_complete_world(m)}
            assert len(complete) <= 1, complete

    @invariant()
    def members_of_a_complete_world_are_at_the_same_step(self) -> None:
        world = self._complete_world() if hasattr(self, "models") else None
        if world is not None:
            assert len({self.models[s.member].step for s in world.seats}) == 1

    @invariant()
    def world_is_never_too_large(self) -> None:
        if hasattr(self, "state") and self.state.world is not None:
            assert self.state.world.size <= SETTINGS.max_members + 1

    def teardown(self) -> None:
        """Check that once the faults end, all living members that fit into the world train."""
        if not hasattr(self, "models"):
            return
        if self.down:
            self._restart_coordinator()
        for model in self.models.values():
            model.hung = False
        for model in self.models.values():
            self._resume_connecting(model)
        for _ in range(60):
            self._let_settle()
        training = [m for m in self.models.values() if m.alive and not m.done]
        if self.ended:
            assert self.state.finished, (self.state.reason, self.state)
        if training and self.state.stopping is None and self.total < FOR_EVER:
            assert self.state.finished, (self.state.reason, self.state)
        elif training and self.state.stopping is None:
            world = self._complete_world()
            assert world is not None, (self.state.reason, self.state)
            assert world.size == min(len(training), SETTINGS.max_members), (self.state.reason, self.state)
            assert (self.models[world.seats[0].member].step or 0) >= self.committed - 1
        self._replay()

    def _replay(self) -> None:
        state = self.first
        for event, at in self.journal:
            state, _ = decide(state, event, at)
        assert state == self.state

    # --- the model's machinery

    def _let_settle(self) -> None:
        for model in list(self.models.values()):
            if model.alive and not model.connected:
                model.connected = True
                model.inbox.clear()
                model.hello()
            if model.works and self._ring_is_broken(model):
                model.break_world()
            if model.works and model.leaving and (model.world is None or model.broken):
                self._depart(model)
        self._deliver_all()
        world = self._complete_world()
        if world is not None:
            self._step(world, [self.models[s.member] for s in world.seats])
        self._pass_time(0.3)

    def _deliver_all(self) -> None:
        for _ in range(400):
            lines = [(m, way) for m in self.models.values() for way in ("out", "in") if self._can_deliver(m, way)]
            if not lines:
                break
            self._deliver(*lines[0])

    def _others_can_continue(self, leaver: Model) -> bool:
        return any(m.works and not m.leaving and m is not leaver for m in self.models.values())

    def _pick(self, data: st.DataObject, wanted: Any) -> Model | None:
        candidates = [m for m in self.models.values() if wanted(m)]
        return data.draw(st.sampled_from(candidates)) if candidates else None

    def _cut(self, model: Model) -> None:
        model.connected = False
        model.inbox.clear()
        model.outbox.clear()

    def _restart_coordinator(self) -> None:
        self.down = False
        self._decide(ev.CoordinatorRestarted())
        for model in self.models.values():
            if model.alive:
                model.connected = True
                model.hello()

    def _pass_time(self, seconds: float) -> None:
        for _ in range(max(1, int(seconds / 0.5))):
            self.now += min(seconds, 0.5)
            if self.down:
                continue
            heartbeats = {m.name: LastHeartbeat(self.now) for m in self.models.values() if m.works and m.connected}
            self._heartbeats = getattr(self, "_heartbeats", {}) | heartbeats
            for event in due(self.state, self._heartbeats, self.now):
                self._decide(event)
            for model in self.models.values():
                if model.works and not model.connected:
                    model.connected = True
                    model.inbox.clear()
                    model.hello()

    def _feed(self, event: Any, model: Model) -> None:
        if not self.down:
            model.outbox.clear()
            self._decide(event)

    def _can_deliver(self, model: Model, way: str) -> bool:
        if self.down:
            return False
        return bool(model.outbox) if way == "out" else bool(model.inbox) and model.works

    def _deliver(self, model: Model, way: str) -> None:
        if way == "in":
            self._receive(model, model.inbox.popleft())
            return
        event = model.outbox.popleft()
        member = self.state.members.get(model.name)
        if not isinstance(event, ev.MemberConnected) and (member is None or member.incarnation != model.incarnation):
            if not isinstance(event, ev.MemberLeft):
                model.inbox.append(ev.EvictMember(model.name, "unknown"))
            return
        self._decide(event)

    def _decide(self, event: Any) -> None:
        self.journal.append((event, self.now))
        if isinstance(event, ev.MemberConnected):
            self._heartbeats = getattr(self, "_heartbeats", {}) | {event.member: LastHeartbeat(self.now)}
        before = self.state
        proposal = before.proposal
        was_proposed = proposal is not None and proposal.number == getattr(event, "world", None)
        self.state, instructions = decide(before, event, self.now)
        self._note_end(event, before)
        self._check_sources(instructions)
        if isinstance(event, ev.MemberLeft) and event.world is not None and was_proposed:
            assert not any(isinstance(i, ev.DissolveWorld) for i in instructions), (
                "a member that left cleanly broke a world"
            )
        for instruction in instructions:
            names = getattr(instruction, "to", None) or [getattr(instruction, "member", "")]
            for name in names:
                model = self.models.get(name)
                if (
                    model is not None
                    and model.alive
                    and model.connected
                    and not isinstance(instruction, ev.MembershipNote)
                ):
                    model.inbox.append(instruction)

    def _note_end(self, event: Any, before: MembershipState) -> None:
        """Record that a member has reported the last step: from then on the run only has to end."""
        member = self.state.members.get(getattr(event, "member", ""))
        if isinstance(event, ev.MemberConnected) and member is not None and member.incarnation == event.incarnation:
            self.ended |= event.done and (not event.early or event.member in before.members)
        elif isinstance(event, ev.MemberDone):
            self.ended = True

    def _check_sources(self, instructions: tuple[Any, ...]) -> None:
        """Check that a member without the state receives it from one that holds it."""
        for instruction in instructions:
            if isinstance(instruction, ev.RestoreCheckpoint):
                assert not self.ended, "the last steps are trained again"
            if isinstance(instruction, ev.FormWorld) and not instruction.world.fresh:
                seats = [s for rank, s in enumerate(instruction.world.seats) if rank not in instruction.world.sources]
                have = [s.member for s in seats if self.state.members[s.member].step is not None]
                assert have, "a world was formed without a state"
            if isinstance(instruction, ev.ProposeWorld):
                world = self.state.world
                assert world is not None
                seated = [world.rank_of(seat.member) is not None for seat in instruction.world.seats]
                assert any(seated), "no member sends the state"

    def _receive(self, model: Model, instruction: Any) -> None:
        if isinstance(instruction, ev.FormWorld):
            self._on_form(model, instruction.world)
        elif isinstance(instruction, ev.ProposeWorld):
            self._on_prepare(model, instruction)
        elif isinstance(instruction, ev.DissolveWorld):
            model.over_up_to = max(model.over_up_to, instruction.number)
            if model.formed is not None and model.formed.number <= instruction.number:
                model.formed = None
            if model.prepared is not None and model.prepared.number <= instruction.number:
                model.prepared = None
            if model.world is not None and model.world.number <= instruction.number:
                if model.broken:
                    model.send(ev.WorldBroken(model.name, model.world.number, model.step))
                else:
                    model.break_world(dissolved=True)
            elif model.world is None:
                model.send(ev.MemberReady(model.name, "f", model.step))
        elif isinstance(instruction, ev.EvictMember):
            model.break_world(answer=False, dissolved=True)
            # The world that it was about to enter is given up too, as a real session does when it is evicted.
            model.world, model.formed, model.broken = None, None, False
            model.hello()
        elif isinstance(instruction, ev.RestoreCheckpoint):
            model.step = self.checkpoint
            model.send(ev.MemberReady(model.name, "f", model.step, restored=True))
            if self.checkpoint is None:
                self.committed = 0
        elif isinstance(instruction, ev.EndTraining):
            model.end_at = instruction.step
            self._report_done([model])
        elif isinstance(instruction, ev.AnnounceFinished):
            assert instruction.step == self.total or any(m.early for m in self.models.values())
            if not model.done:
                model.alive = model.connected = False

    def _on_form(self, model: Model, world: World) -> None:
        current = model.world.number if model.world else 0
        if world.number <= max(current, self._current_number(model) or 0, model.over_up_to):
            return
        model.break_world()
        model.formed, model.joins_after, model.prepared = world, None, None
        self._try_enter(world)

    def _on_prepare(self, model: Model, instruction: ev.ProposeWorld) -> None:
        current = self._current_number(model)
        if instruction.world.number <= model.over_up_to or current not in (None, instruction.after):
            return
        if current is not None:
            model.prepared = instruction.world
        elif instruction.world.rank_of(model.name) is not None:
            model.formed, model.joins_after = instruction.world, instruction.after

    def _current_number(self, model: Model) -> int | None:
        if model.world is not None and not model.broken:
            return model.world.number
        return model.formed.number if model.formed is not None and model.joins_after is None else None

    def _try_enter(self, world: World) -> None:
        """Enter a formed world once all of its members have connected; those without the state receive it."""
        seats = [self.models[s.member] for s in world.seats]
        if not all(m.works and m.formed == world for m in seats):
            return
        for rank, model in enumerate(seats):
            source = world.sources.get(rank)
            if world.fresh:
                model.step = 0
            elif source is not None:
                model.step = seats[source].step
            model.world, model.formed, model.broken = world, None, False
        self._report_done(seats)

    def _report_done(self, models: list[Model]) -> None:
        """Let members that have done the last step report it and stop training."""
        for model in models:
            if not model.alive or model.done or model.step is None:
                continue
            if model.step == self.total or model.step >= model.end_at:
                model.done, model.early = True, model.step != self.total
                model.send(ev.MemberDone(model.name, model.step, model.early))

    def _resume_connecting(self, model: Model) -> None:
        if model.formed is not None and model.joins_after is None:
            self._try_enter(model.formed)

    def _is_in_complete_world(self, model: Model) -> bool:
        world = model.world
        if world is None or model.broken or not model.works:
            return False
        return all(
            self.models[s.member].works
            and not self.models[s.member].done
            and self.models[s.member].world is not None
            and self.models[s.member].world.number == world.number
            and not self.models[s.member].broken
            for s in world.seats
        )

    def _complete_world(self) -> World | None:
        return next((m.world for m in self.models.values() if self._is_in_complete_world(m)), None)

    def _ring_is_broken(self, model: Model) -> bool:
        world = model.world
        if world is None or model.broken or model.done:
            return False
        return any(
            not self.models[s.member].alive
            or self.models[s.member].done
            or self.models[s.member].world is None
            or self.models[s.member].world.number < world.number
            or self.models[s.member].broken
            or self.models[s.member].world.rank_of(model.name) is None
            for s in world.seats
        )

    def _step(self, world: World, committing: list[Model]) -> None:
        seats = [self.models[s.member] for s in world.seats]
        numbers = {m.prepared.number if m.prepared else 0 for m in seats}
        agreed = numbers.pop() if len(numbers) == 1 else 0
        target = next((m.prepared for m in seats if m.prepared), None) if agreed else None
        last = (seats[0].step or 0) + 1 >= self.total
        if target is not None and (last or not self._connected(target, seats)):
            target = None
        for model in committing:
            model.step = (model.step or 0) + 1
        self.committed = max([self.committed, *((m.step or 0) for m in committing)])
        if target is None:
            self._report_done(committing)
            return
        step = committing[0].step if committing else None
        for model in committing:
            model.prepared = None
            if target.rank_of(model.name) is not None:
                model.world = target
                model.send(ev.WorldEntered(model.name, target.number, model.step or 0))
            else:
                self._depart(model, target.number)
        for rank in target.sources:
            joiner = self.models[target.seats[rank].member]
            if joiner.formed == target and joiner.works and step is not None:
                joiner.world, joiner.formed, joiner.broken, joiner.step = target, None, False, step
                joiner.send(ev.WorldEntered(joiner.name, target.number, step))
        self._report_done([self.models[s.member] for s in target.seats] + committing)

    def _connected(self, target: World, seats: list[Model]) -> bool:
        """Return whether all members of the proposed world work and know of it, so that its ring is connected."""
        for seat in target.seats:
            model = self.models[seat.member]
            knows = model.formed == target or (model in seats and model.prepared == target)
            if not model.works or not knows:
                return False
        return True

    def _depart(self, model: Model, number: int | None = None) -> None:
        if model.leaving:
            model.send(ev.MemberLeft(model.name, model.step, number))
            model.alive = False
        else:
            model.world, model.step, model.broken = None, None, False
            model.hello()


TestMembership = Membership.TestCase
TestMembership.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
