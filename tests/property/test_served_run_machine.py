"""Trainers and servers come, go, die and finish in any order, and runs are stopped: all of it comes to an end.

What servers acknowledge is in `test_placement_machine`; here a part is where it was copied to. Members do what
`shoal.worker.parameter_server.served_session`, `.pushing` and `.service` do: a trainer cannot end its ticket while a
server is missing, and the last checkpoint takes all parts. Where it is calm, all is heard at once: few examples would
otherwise get that far.
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

HERE = Address("h", 1)
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
        self.live: dict[str, Model] = {}
        self.checkpoint: int | None = None
        self.over_in: int | None = None
        self.left_behind = False
        for name in (*SERVERS[:servers], *TRAINERS) if begun or calm else ():
            self._come(name)
        if begun or calm:
            self._settle()

    # --- what may happen

    @rule(name=NAMES)
    def come(self, name: str) -> None:
        if name not in self.live and self.state.stopping is None:
            self._come(name)

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        if self.live.pop(name, None) is not None and name in self.state.members:
            self._tell(ev.MemberLost(name, "killed"))

    @precondition(lambda self: not self.calm)
    @rule(name=NAMES)
    def line_breaks(self, name: str) -> None:
        model = self.live.get(name)
        if model is not None and model.connected:
            self._disconnect(model)
            self._tell(ev.MemberDisconnected(name))

    @rule(name=NAMES)
    def lease_runs_out(self, name: str) -> None:
        if name in self.state.members:
            self._tell(ev.MemberLost(name, "silent"))

    @precondition(lambda self: not self.calm)
    @rule(name=NAMES)
    def line_is_back(self, name: str) -> None:
        model = self.live.get(name)
        if model is not None and not model.connected:
            self._hello(model)

    @rule(name=NAMES)
    def notice(self, name: str) -> None:
        model = self.live.get(name)
        if model is not None and not model.leaving:
            model.leaving = True
            self._say(model, ev.NoticeReceived(name, 30.0, "spot"))

    @rule(name=NAMES)
    def time_is_up(self, name: str) -> None:
        model = self.live.get(name)
        if model is not None and model.leaving and not model.done:
            self._write(model)
            self._leave(model)

    @rule(name=st.sampled_from(TRAINERS))
    def last_ticket(self, name: str) -> None:
        self._finish(self.live.get(name))

    @rule(name=st.sampled_from(TRAINERS), known=st.booleans())
    def is_away_at_the_end(self, name: str, known: bool) -> None:
        """Its last ticket is finished while its line is broken; it may be taken for lost meanwhile."""
        model = self.live.get(name)
        if model is not None and model.connected and name in self.state.members:
            self._disconnect(model)
            self._tell(ev.MemberDisconnected(name))
            self._finish(model)
            if not known:
                self._tell(ev.MemberLost(name, "silent"))
            self._hello(model)

    @rule(name=st.sampled_from(TRAINERS))
    def break_out(self, name: str) -> None:
        model = self.live.get(name)
        if model is not None and model.placement is not None and not model.done:
            model.done = model.early = True
            self._say(model, ev.MemberDone(name, 3, early=True))

    @precondition(lambda self: not self.calm)
    @rule(name=NAMES, server=st.sampled_from(SERVERS))
    def cannot_reach(self, name: str, server: str) -> None:
        model = self.live.get(name)
        if model is not None and model.placement is not None and model.placement.seat_of(server) is not None:
            self._say(model, ev.ServerUnreachable(name, server, model.placement.number, "reset"))

    @precondition(lambda self: not self.calm)
    @rule()
    def coordinator_restarts(self) -> None:
        for model in self.live.values():
            self._disconnect(model)
        self._tell(ev.CoordinatorRestarted())

    @rule(name=NAMES)
    def hear(self, name: str) -> None:
        model = self.live.get(name)
        for _ in range(len(model.inbox) if model is not None else 0):
            if model is not None and model.inbox and name in self.live:
                self._hear(model, model.inbox.popleft())

    @rule(name=NAMES)
    def work(self, name: str) -> None:
        if name in self.live:
            self._work(self.live[name])

    @rule()
    def all_is_heard_and_done(self) -> None:
        self._settle()

    @precondition(lambda self: self.live)
    @rule(checkpoint=st.booleans())
    def stop(self, checkpoint: bool) -> None:
        if self.state.stopping is None and not self.state.finished:
            self._tell(ev.StopRequested("enough", checkpoint, 75))

    # --- promises

    @invariant()
    def when_calm_all_is_heard_at_once(self) -> None:
        """No trainer finishes its ticket, so that others may leave before it does."""
        if not getattr(self, "calm", False):
            return
        while any(model.inbox for model in self.live.values()):
            for name in list(self.live):
                self.hear(name)
            for model in list(self.live.values()):
                if model.serves and model.placement is not None:
                    self._serve(model, model.placement)

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        for model in list(self.live.values()):
            if not model.connected:
                self._hello(model)
        self._settle()
        for model in [m for m in self.live.values() if m.leaving and not m.done]:
            self.time_is_up(model.name)
        self._settle()
        if self.state.stopping is None and not self.state.finished:
            for name in (SERVERS[0], TRAINERS[0], TRAINERS[1]):
                self.come(name)
            self._settle()
            self._check_that_it_trains()
            for name in TRAINERS:
                self._finish(self.live.get(name))
            self._settle()
            assert self.state.finished, self.state
        elif self.state.stopping is not None and not self.state.finished:
            waiting = [m.name for m in self.live.values() if not m.done]
            assert not waiting, f"{waiting} never stop: {self.state}"
            if self.left_behind:
                assert self.checkpoint is not None, f"nothing is left of the run: {self.state}"
        self._replay()

    def _check_that_it_trains(self) -> None:
        if self.state.done_at is not None:
            return
        placement = self.state.placement
        assert placement is not None, self.state
        for model in self.live.values():
            if not model.done and (not model.serves or placement.held_by(model.name)):
                assert self.state.members[model.name].status == TRAINING, (model, self.state)
                assert model.placement == placement, (model, self.state)

    def _replay(self) -> None:
        state = self.first
        for event, now in self.journal:
            state, _ = sv.decide(state, event, now)
        assert state == self.state

    # --- the coordinator

    def _tell(self, event: ev.Event) -> None:
        self.journal.append((event, self.now))
        before, (self.state, instructions) = self.state, sv.decide(self.state, event, self.now)
        if self.state.finished and not before.finished:
            self._check_end(event)
        if before.placement is not None and self.state.placement is None and not self.state.finished:
            self._check_loss(before.placement)
        if self.state.stopping is not None and before.stopping is None:
            self.checkpoint = None
            self.left_behind = self.state.stopping.checkpoint and self.state.placement is not None
        for one in instructions:
            to = getattr(one, "to", None) or (getattr(one, "member", ""),)
            for name in to:
                model = self.live.get(name)
                if model is not None and model.connected and not isinstance(one, ev.MembershipNote | ev.GrantClaim):
                    model.inbox.append(one)

    def _check_end(self, event: ev.Event) -> None:
        """A run is finished if a trainer has done its last step, or the last trainer has left its loop."""
        left = isinstance(event, ev.MemberDone | ev.MemberConnected) and event.early
        assert self.over_in is not None or left, f"finished by {event}"

    def _check_loss(self, before: Placement) -> None:
        """The state is given up only if a part is lost with all that held it, or when it is in the last checkpoint."""
        seated = [s.member for s in before.servers if self._has(s.member, s.incarnation)]
        if core_placement.promote_backups(before.assignments, seated) is None:
            self.left_behind = False
        else:
            assert self.state.stopping is not None, "the state was given up although a server held all of it"

    def _has(self, name: str, incarnation: str) -> bool:
        known = self.state.members.get(name)
        return known is not None and known.incarnation == incarnation

    # --- members

    def _come(self, name: str) -> None:
        self.count += 1
        self.live[name] = Model(name, str(self.count))
        self._hello(self.live[name])

    def _hello(self, model: Model) -> None:
        model.connected = True
        role = "server" if model.serves else "trainer"
        step = 5 if model.done else None
        hello = ev.MemberConnected(
            model.name, model.incarnation, HERE, None, step, done=model.done, role=role, early=model.early
        )
        self._tell(hello)
        self._say(model, ev.MemberReady(model.name, "m", step))
        if model.leaving:
            self._say(model, ev.NoticeReceived(model.name, 30.0, "spot"))

    def _say(self, model: Model, event: ev.Event) -> None:
        if model.connected and model.name in self.live:
            if self._has(model.name, model.incarnation):
                self._tell(event)
            elif not self.state.finished:
                model.inbox.append(ev.EvictMember(model.name, "its lease ran out"))

    def _disconnect(self, model: Model) -> None:
        model.connected = False
        model.inbox.clear()

    def _hear(self, model: Model, told: Any) -> None:
        if isinstance(told, ev.PublishPlacement):
            if model.placement is None or told.placement.number > model.placement.number:
                model.placement = told.placement
        elif isinstance(told, ev.EvictMember):
            model.placement = None
            self._hello(model)
        elif isinstance(told, ev.RestoreCheckpoint):
            self._say(model, ev.MemberReady(model.name, "m", self.checkpoint, restored=True))
        elif isinstance(told, ev.StopMembers):
            model.stop = told
        elif isinstance(told, ev.AnnounceFinished | ev.RejectMember) and not model.done:
            del self.live[model.name]

    def _work(self, model: Model) -> None:
        placement = model.placement
        if model.done:
            return
        if model.stop is not None and model.serves:
            self._write(model)
            self._leave(model)
        elif model.stop is not None or (model.leaving and not model.serves):
            nothing_kept = model.stop is not None and not model.stop.checkpoint
            if placement is None or nothing_kept or self._whole(placement):
                self._leave(model)
        elif model.leaving and (placement is None or placement.seat_of(model.name) is None):
            self._leave(model)
        elif not model.serves and placement is not None and placement.generation == self.over_in:
            self._finish(model)
        if model.serves and placement is not None:
            self._serve(model, placement)

    def _serve(self, model: Model, placement: Placement) -> None:
        for part, holding in enumerate(placement.assignments):
            if holding.primary == model.name and holding.learner in self.live:
                self._say(model, ev.PartCopied(model.name, part, holding.learner, holding.since))
            if holding.primary == model.name and holding.handing_off:
                self._say(model, ev.PartReleased(model.name, part, placement.number))

    def _whole(self, placement: Placement) -> bool:
        """Whether all who answer for a part are there."""
        seats = [placement.seat_of(holding.primary) for holding in placement.assignments]
        return all(s and s.member in self.live and self.live[s.member].incarnation == s.incarnation for s in seats)

    def _write(self, model: Model) -> None:
        placement = model.placement
        instructions = model.leaving or (model.stop is not None and model.stop.checkpoint)
        leads = model.serves and placement is not None and placement.assignments[LEDGER].primary == model.name
        if instructions and leads and placement is not None and self._whole(placement):
            self.checkpoint = 7

    def _finish(self, model: Model | None) -> None:
        """Its ledger says that every ticket is finished."""
        if model is None or model.placement is None or model.done or not self._whole(model.placement):
            return
        self.over_in = model.placement.generation
        model.done = True
        self._say(model, ev.MemberDone(model.name, 5))

    def _leave(self, model: Model) -> None:
        self._say(model, ev.MemberLeft(model.name, None))
        self.live.pop(model.name, None)
        if not model.connected and model.name in self.state.members:
            self._tell(ev.MemberLost(model.name, "its process ended"))

    def _settle(self) -> None:
        """Deliver all messages, and let every member do what it can."""
        self.now += 0.2
        self._tell(ev.TimerFired("regroup"))
        for _ in range(60):
            before = self.state
            for name in list(self.live):
                self.hear(name)
                self.work(name)
            if self.state == before and not any(model.inbox for model in self.live.values()):
                return
        raise AssertionError(f"they never come to rest: {self.state}")


TestServedRun = ServedRun.TestCase
TestServedRun.settings = settings(max_examples=150, stateful_step_count=30)
