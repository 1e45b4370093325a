"""Trainers and servers join, leave, die and finish in any order, and runs are stopped: every run ends.

`test_placement_machine` checks what servers acknowledge; here a copied part counts as held. Members behave like
`served_session`, `server_client` and `server_main` of `shoal.worker.parameter_server`: a trainer cannot finish its
ticket while a server is missing, and the last checkpoint contains all parts. In a calm example every message is
delivered at once: few examples would otherwise get that far.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.core import placement as core_placement
from shoal.core.membership import events as ev
from shoal.core.membership.state import TRAINING, MembershipSettings, MembershipState
from shoal.core.parameter_server import decide as sv
from shoal.core.placement import LEDGER, Placement
from shoal.core.world import Address

ADDRESS = Address("h", 1)
TRAINERS, SERVERS = ("t0", "t1"), ("s0", "s1", "s2")
NAMES = st.sampled_from([*TRAINERS, *SERVERS])


@dataclasses.dataclass
class Model:
    """A member as it sees itself."""

    name: str
    incarnation: str
    connected: bool = True
    placement: Placement | None = None
    leaving: bool = False
    done: bool = False
    early: bool = False
    stop: ev.StopMembers | None = None
    inbox: deque[Any] = dataclasses.field(default_factory=deque)

    @property
    def serves(self) -> bool:
        return self.name in SERVERS


class ServedRun(RuleBasedStateMachine):
    @initialize(servers=st.integers(1, 2), begun=st.booleans(), calm=st.booleans())
    def begin(self, servers: int, begun: bool, calm: bool) -> None:
        self.calm = calm
        self.now, self.count = 1000.0, 0
        self.state = self.first = MembershipState(MembershipSettings(1, 2, servers=servers, regroup_s=0.0))
        self.journal: list[tuple[ev.Event, float]] = []
        self.alive: dict[str, Model] = {}
        self.checkpoint: int | None = None
        self.finished_in: int | None = None
        self.checkpoint_expected = False
        for name in (*SERVERS[:servers], *TRAINERS) if begun or calm else ():
            self._join(name)
        if begun or calm:
            self._let_settle()

    # --- what may happen

    @rule(name=NAMES)
    def member_joins(self, name: str) -> None:
        if name not in self.alive and self.state.stopping is None:
            self._join(name)

    @rule(name=NAMES)
    def member_dies(self, name: str) -> None:
        if self.alive.pop(name, None) is not None and name in self.state.members:
            self._decide(ev.MemberLost(name, "killed"))

    @precondition(lambda self: not self.calm)
    @rule(name=NAMES)
    def connection_is_lost(self, name: str) -> None:
        model = self.alive.get(name)
        if model is not None and model.connected:
            self._disconnect(model)
            self._decide(ev.MemberDisconnected(name))

    @rule(name=NAMES)
    def lease_expires(self, name: str) -> None:
        if name in self.state.members:
            self._decide(ev.MemberLost(name, "silent"))

    @precondition(lambda self: not self.calm)
    @rule(name=NAMES)
    def member_reconnects(self, name: str) -> None:
        model = self.alive.get(name)
        if model is not None and not model.connected:
            self._hello(model)

    @rule(name=NAMES)
    def member_gets_notice(self, name: str) -> None:
        model = self.alive.get(name)
        if model is not None and not model.leaving:
            model.leaving = True
            self._send(model, ev.NoticeReceived(name, 30.0, "spot"))

    @rule(name=NAMES)
    def notice_expires(self, name: str) -> None:
        model = self.alive.get(name)
        if model is not None and model.leaving and not model.done:
            self._write(model)
            self._leave(model)

    @rule(name=st.sampled_from(TRAINERS))
    def trainer_finishes_the_last_ticket(self, name: str) -> None:
        self._finish(self.alive.get(name))

    @rule(name=st.sampled_from(TRAINERS), declared_lost=st.booleans())
    def trainer_finishes_while_disconnected(self, name: str, declared_lost: bool) -> None:
        """Finish the last ticket of a trainer without a connection; the coordinator may declare it lost meanwhile."""
        model = self.alive.get(name)
        if model is not None and model.connected and name in self.state.members:
            self._disconnect(model)
            self._decide(ev.MemberDisconnected(name))
            self._finish(model)
            if declared_lost:
                self._decide(ev.MemberLost(name, "silent"))
            self._hello(model)

    @rule(name=st.sampled_from(TRAINERS))
    def trainer_leaves_the_loop(self, name: str) -> None:
        model = self.alive.get(name)
        if model is not None and model.placement is not None and not model.done:
            model.done = model.early = True
            self._send(model, ev.MemberDone(name, 3, early=True))

    @precondition(lambda self: not self.calm)
    @rule(name=NAMES, server=st.sampled_from(SERVERS))
    def member_cannot_reach_a_server(self, name: str, server: str) -> None:
        model = self.alive.get(name)
        if model is not None and model.placement is not None and model.placement.seat_of(server) is not None:
            self._send(model, ev.ServerUnreachable(name, server, model.placement.number, "reset"))

    @precondition(lambda self: not self.calm)
    @rule()
    def coordinator_restarts(self) -> None:
        for model in self.alive.values():
            self._disconnect(model)
        self._decide(ev.CoordinatorRestarted())

    @rule(name=NAMES)
    def member_receives_its_messages(self, name: str) -> None:
        model = self.alive.get(name)
        for _ in range(len(model.inbox) if model is not None else 0):
            if model is not None and model.inbox and name in self.alive:
                self._receive(model, model.inbox.popleft())

    @rule(name=NAMES)
    def member_works(self, name: str) -> None:
        if name in self.alive:
            self._work(self.alive[name])

    @rule()
    def all_messages_arrive_and_all_members_work(self) -> None:
        self._let_settle()

    @precondition(lambda self: self.alive)
    @rule(checkpoint=st.booleans())
    def run_is_stopped(self, checkpoint: bool) -> None:
        if self.state.stopping is None and not self.state.finished:
            self._decide(ev.StopRequested("enough", checkpoint, 75))

    # --- invariants

    @invariant()
    def all_messages_arrive_at_once_in_a_calm_example(self) -> None:
        """Deliver all messages, but let no trainer finish its ticket, so that others may leave before it does."""
        if not getattr(self, "calm", False):
            return
        while any(model.inbox for model in self.alive.values()):
            for name in list(self.alive):
                self.member_receives_its_messages(name)
            for model in list(self.alive.values()):
                if model.serves and model.placement is not None:
                    self._serve(model, model.placement)

    def teardown(self) -> None:
        if not hasattr(self, "alive"):
            return
        for model in list(self.alive.values()):
            if not model.connected:
                self._hello(model)
        self._let_settle()
        for model in [m for m in self.alive.values() if m.leaving and not m.done]:
            self.notice_expires(model.name)
        self._let_settle()
        if self.state.stopping is None and not self.state.finished:
            for name in (SERVERS[0], TRAINERS[0], TRAINERS[1]):
                self.member_joins(name)
            self._let_settle()
            self._check_that_it_trains()
            for name in TRAINERS:
                self._finish(self.alive.get(name))
            self._let_settle()
            assert self.state.finished, self.state
        elif self.state.stopping is not None and not self.state.finished:
            waiting = [m.name for m in self.alive.values() if not m.done]
            assert not waiting, f"{waiting} never stop: {self.state}"
            if self.checkpoint_expected:
                assert self.checkpoint is not None, f"no checkpoint of the run was written: {self.state}"
        self._replay()

    def _check_that_it_trains(self) -> None:
        if self.state.done_at is not None:
            return
        placement = self.state.placement
        assert placement is not None, self.state
        for model in self.alive.values():
            if not model.done and (not model.serves or placement.held_by(model.name)):
                assert self.state.members[model.name].status == TRAINING, (model, self.state)
                assert model.placement == placement, (model, self.state)

    def _replay(self) -> None:
        state = self.first
        for event, now in self.journal:
            state, _ = sv.decide(state, event, now)
        assert state == self.state

    # --- the coordinator

    def _decide(self, event: ev.Event) -> None:
        self.journal.append((event, self.now))
        before, (self.state, instructions) = self.state, sv.decide(self.state, event, self.now)
        if self.state.finished and not before.finished:
            self._check_end(event)
        if before.placement is not None and self.state.placement is None and not self.state.finished:
            self._check_loss(before.placement)
        if self.state.stopping is not None and before.stopping is None:
            self.checkpoint = None
            self.checkpoint_expected = self.state.stopping.checkpoint and self.state.placement is not None
        for instruction in instructions:
            to = getattr(instruction, "to", None) or (getattr(instruction, "member", ""),)
            for name in to:
                model = self.alive.get(name)
                delivered = not isinstance(instruction, ev.MembershipNote | ev.GrantClaim)
                if model is not None and model.connected and delivered:
                    model.inbox.append(instruction)

    def _check_end(self, event: ev.Event) -> None:
        """Check that a trainer has done its last step, or that the last trainer has left its loop."""
        left_loop = isinstance(event, ev.MemberDone | ev.MemberConnected) and event.early
        assert self.finished_in is not None or left_loop, f"finished by {event}"

    def _check_loss(self, before: Placement) -> None:
        """Check that the state is given up only if all copies of a part are lost, or if the run stops."""
        seated = [s.member for s in before.servers if self._has(s.member, s.incarnation)]
        if core_placement.promote_backups(before.assignments, seated) is None:
            self.checkpoint_expected = False
        else:
            assert self.state.stopping is not None, "the state was given up although a server held all of it"

    def _has(self, name: str, incarnation: str) -> bool:
        member = self.state.members.get(name)
        return member is not None and member.incarnation == incarnation

    # --- members

    def _join(self, name: str) -> None:
        self.count += 1
        self.alive[name] = Model(name, str(self.count))
        self._hello(self.alive[name])

    def _hello(self, model: Model) -> None:
        model.connected = True
        role = "server" if model.serves else "trainer"
        step = 5 if model.done else None
        hello = ev.MemberConnected(
            model.name, model.incarnation, ADDRESS, None, step, done=model.done, role=role, early=model.early
        )
        self._decide(hello)
        self._send(model, ev.MemberReady(model.name, "m", step))
        if model.leaving:
            self._send(model, ev.NoticeReceived(model.name, 30.0, "spot"))

    def _send(self, model: Model, event: ev.Event) -> None:
        if model.connected and model.name in self.alive:
            if self._has(model.name, model.incarnation):
                self._decide(event)
            elif not self.state.finished:
                model.inbox.append(ev.EvictMember(model.name, "its lease ran out"))

    def _disconnect(self, model: Model) -> None:
        model.connected = False
        model.inbox.clear()

    def _receive(self, model: Model, instruction: Any) -> None:
        if isinstance(instruction, ev.PublishPlacement):
            if model.placement is None or instruction.placement.number > model.placement.number:
                model.placement = instruction.placement
        elif isinstance(instruction, ev.EvictMember):
            model.placement = None
            self._hello(model)
        elif isinstance(instruction, ev.RestoreCheckpoint):
            self._send(model, ev.MemberReady(model.name, "m", self.checkpoint, restored=True))
        elif isinstance(instruction, ev.StopMembers):
            model.stop = instruction
        elif isinstance(instruction, ev.AnnounceFinished | ev.RejectMember) and not model.done:
            del self.alive[model.name]

    def _work(self, model: Model) -> None:
        placement = model.placement
        if model.done:
            return
        if model.stop is not None and model.serves:
            self._write(model)
            self._leave(model)
        elif model.stop is not None or (model.leaving and not model.serves):
            without_checkpoint = model.stop is not None and not model.stop.checkpoint
            if placement is None or without_checkpoint or self._has_all_primaries(placement):
                self._leave(model)
        elif model.leaving and (placement is None or placement.seat_of(model.name) is None):
            self._leave(model)
        elif not model.serves and placement is not None and placement.generation == self.finished_in:
            self._finish(model)
        if model.serves and placement is not None:
            self._serve(model, placement)

    def _serve(self, model: Model, placement: Placement) -> None:
        for part, assignment in enumerate(placement.assignments):
            if assignment.primary == model.name and assignment.learner in self.alive:
                self._send(model, ev.PartCopied(model.name, part, assignment.learner, assignment.since))
            if assignment.primary == model.name and assignment.handing_off:
                self._send(model, ev.PartReleased(model.name, part, placement.number))

    def _has_all_primaries(self, placement: Placement) -> bool:
        """Return whether the primaries of all parts are alive."""
        seats = [placement.seat_of(assignment.primary) for assignment in placement.assignments]
        return all(s and s.member in self.alive and self.alive[s.member].incarnation == s.incarnation for s in seats)

    def _write(self, model: Model) -> None:
        placement = model.placement
        wants_checkpoint = model.leaving or (model.stop is not None and model.stop.checkpoint)
        leads = model.serves and placement is not None and placement.assignments[LEDGER].primary == model.name
        if wants_checkpoint and leads and placement is not None and self._has_all_primaries(placement):
            self.checkpoint = 7

    def _finish(self, model: Model | None) -> None:
        """Let a trainer find in its ledger that every ticket is finished."""
        if model is None or model.placement is None or model.done or not self._has_all_primaries(model.placement):
            return
        self.finished_in = model.placement.generation
        model.done = True
        self._send(model, ev.MemberDone(model.name, 5))

    def _leave(self, model: Model) -> None:
        self._send(model, ev.MemberLeft(model.name, None))
        self.alive.pop(model.name, None)
        if not model.connected and model.name in self.state.members:
            self._decide(ev.MemberLost(model.name, "its process ended"))

    def _let_settle(self) -> None:
        """Deliver all messages, and let every member do what it can."""
        self.now += 0.2
        self._decide(ev.TimerFired("regroup"))
        for _ in range(60):
            before = self.state
            for name in list(self.alive):
                self.member_receives_its_messages(name)
                self.member_works(name)
            if self.state == before and not any(model.inbox for model in self.alive.values()):
                return
        raise AssertionError(f"the members never settle: {self.state}")


TestServedRun = ServedRun.TestCase
TestServedRun.settings = settings(max_examples=150, stateful_step_count=30)
