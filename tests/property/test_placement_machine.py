"""Servers come, die, hang and wake up, and news arrives late: what was ever acknowledged is never lost with one server.

The servers here do what `shoal.worker.parameter_server.server` does, without sockets: a primary acknowledges a write
only when its backup has taken it in, or when it has heard of a placement without that backup.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.core.membership import events as ev
from shoal.core.membership.state import MembershipSettings, MembershipState
from shoal.core.parameter_server import decide as sv
from shoal.core.placement import PartAssignment, Placement
from shoal.core.world import Address

HERE = Address("h", 1)
NAMES = st.sampled_from(["s0", "s1", "s2"])


@dataclass
class Server:
    """A server as it sees itself."""

    name: str
    incarnation: str
    known: Placement | None = None
    parts: dict[int, list[int]] = field(default_factory=dict)
    resting: set[int] = field(default_factory=set)
    copies: dict[int, dict[str, int]] = field(default_factory=dict)
    stuck: dict[int, tuple[int, str, int]] = field(default_factory=dict)
    inbox: deque[Any] = field(default_factory=deque)
    expelled: bool = False

    def holding(self, part: int) -> PartAssignment | None:
        return self.known.assignments[part] if self.known is not None and part < len(self.known.assignments) else None

    def leads(self, part: int) -> bool:
        holding = self.holding(part)
        return holding is not None and holding.primary == self.name and part in self.parts


class Placements(RuleBasedStateMachine):
    @initialize(servers=st.integers(1, 3))
    def start(self, servers: int) -> None:
        self.state = MembershipState(MembershipSettings(servers=servers, regroup_s=0.0))
        self.live: dict[str, Server] = {}
        self.now = 1000.0
        self.count = 0
        self.acked: dict[tuple[int, int], set[int]] = {}
        self.outbox: list[ev.Event] = []
        self.tell(ev.MemberConnected("t", "t", HERE))
        self.tell(ev.MemberReady("t", "m", None))

    # --- the coordinator

    def tell(self, event: ev.Event) -> None:
        self.state, instructions = sv.decide(self.state, event, self.now)
        self.carry_out(instructions)

    def carry_out(self, instructions: tuple[ev.Instruction, ...]) -> None:
        for one in instructions:
            if isinstance(one, ev.PublishPlacement):
                for name in one.to:
                    if name in self.live and not self.live[name].expelled:
                        self.live[name].inbox.append(one.placement)
            elif isinstance(one, ev.RestoreCheckpoint):
                # There is no checkpoint here: training starts over.
                self.outbox.append(ev.MemberReady(one.member, "m", None, restored=True))

    @rule()
    def hear(self) -> None:
        if self.outbox:
            event = self.outbox.pop(0)
            if getattr(event, "member", "") in self.state.members:
                self.tell(event)

    @rule(name=NAMES)
    def come(self, name: str) -> None:
        if name not in self.live:
            self.count += 1
            self.live[name] = Server(name, str(self.count))
            self.tell(ev.MemberConnected(name, str(self.count), HERE, role="server"))
            self.tell(ev.MemberReady(name, "m", None))

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        if self.live.pop(name, None) is not None:
            self.tell(ev.MemberLost(name, "killed"))

    @rule(name=NAMES)
    def hang(self, name: str) -> None:
        """Its lease runs out, but it lives on with what it knew."""
        server = self.live.get(name)
        if server is not None and not server.expelled:
            server.expelled = True
            server.inbox.clear()
            self.tell(ev.MemberLost(name, "silent"))

    @rule(name=NAMES)
    def wake(self, name: str) -> None:
        server = self.live.get(name)
        if server is not None and server.expelled:
            self.live[name] = Server(name, server.incarnation)
            self.tell(ev.MemberConnected(name, server.incarnation, HERE, role="server"))
            self.tell(ev.MemberReady(name, "m", None))

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        if name in self.live and name in self.state.members:
            self.tell(ev.NoticeReceived(name, 30.0, "spot"))

    @rule()
    def later(self) -> None:
        self.now += 1.0
        self.tell(ev.TimerFired("regroup"))

    # --- the servers

    @rule(name=NAMES)
    def adopt(self, name: str) -> None:
        server = self.live.get(name)
        if server is None or not server.inbox:
            return
        placement = server.inbox.popleft()
        if server.known is not None and server.known.number >= placement.number:
            return
        before, server.known = server.known, placement
        if before is not None and before.generation != placement.generation:
            server.parts.clear()
            server.stuck.clear()
            server.copies.clear()
        mine = placement.held_by(name)
        if before is not None and not mine:
            leaving = name in self.state.members and self.state.members[name].leaving
            if leaving:
                del self.live[name]
                self.tell(ev.MemberLeft(name, None))
                return
        for part in [p for p in server.parts if p not in mine]:
            del server.parts[part]
            server.stuck.pop(part, None)
        for part in mine:
            self._hold(server, part, placement)

    def _hold(self, server: Server, part: int, placement: Placement) -> None:
        holding = placement.assignments[part]
        if holding.primary != server.name:
            server.stuck.pop(part, None)
            server.copies.pop(part, None)
            return
        server.parts.setdefault(part, [])
        copies = server.copies.setdefault(part, {})
        for copy, since in list(copies.items()):
            if not (copy == holding.backup or (copy == holding.learner and since == holding.since)):
                del copies[copy]
        if holding.backup:
            copies.setdefault(holding.backup, holding.since)
        if part in server.stuck:
            write, copy, since = server.stuck[part]
            if not (copy == holding.backup or (copy == holding.learner and since == holding.since)):
                del server.stuck[part]
                self.acked.setdefault((placement.generation, part), set()).add(write)
        if not holding.handing_off:
            server.resting.discard(part)

    def _takes_in(self, primary: Server, name: str, part: int) -> bool:
        """Whether a copy accepts an entry of this primary."""
        other = self.live.get(name)
        if other is None or other.known is None or primary.known is None:
            return False
        holding = other.holding(part)
        if other.known.number < primary.known.number or holding is None:
            return False
        keeps = other.known.generation == primary.known.generation and holding.primary == primary.name
        return keeps and name in (holding.backup, holding.learner) and part in other.parts

    @rule(name=NAMES, part=st.integers(0, 3))
    def write(self, name: str, part: int) -> None:
        server = self.live.get(name)
        if server is None or not server.leads(part) or part in server.stuck or part in server.resting:
            return
        assert server.known is not None
        self.count += 1
        refused = ""
        for copy in server.copies.get(part, {}):
            held = server.parts[part]
            if self._takes_in(server, copy, part) and self.live[copy].parts[part] == held:
                self.live[copy].parts[part] = [*held, self.count]
            else:
                refused = copy
        server.parts[part] = [*server.parts[part], self.count]
        if not refused:
            self.acked.setdefault((server.known.generation, part), set()).add(self.count)
        else:
            server.stuck[part] = (self.count, refused, server.copies[part][refused])
            if not server.expelled:
                self.outbox.append(ev.ServerUnreachable(name, refused, server.known.number, "refused"))

    @precondition(lambda self: any(s.stuck for s in self.live.values()))
    @rule(name=NAMES)
    def insist(self, name: str) -> None:
        server = self.live.get(name)
        if server is not None and server.known is not None and not server.expelled:
            for _, copy, _ in server.stuck.values():
                self.outbox.append(ev.ServerUnreachable(name, copy, server.known.number, "refused"))

    @rule(name=NAMES, part=st.integers(0, 3))
    def copy(self, name: str, part: int) -> None:
        """Give the learner all, under the part's lock."""
        server = self.live.get(name)
        if server is None or not server.leads(part) or part in server.stuck or server.known is None:
            return
        holding = server.known.assignments[part]
        learner = self.live.get(holding.learner)
        if not holding.learner or learner is None or learner.known is None:
            return
        theirs = learner.holding(part)
        if (
            learner.known.number < server.known.number
            or theirs is None
            or learner.known.generation != server.known.generation
        ):
            return
        if theirs.primary != name or learner.name not in (theirs.backup, theirs.learner):
            return
        learner.parts[part] = list(server.parts[part])
        server.copies.setdefault(part, {})[learner.name] = holding.since
        if not server.expelled:
            self.outbox.append(ev.PartCopied(name, part, learner.name, holding.since))

    @rule(name=NAMES, part=st.integers(0, 3))
    def rest(self, name: str, part: int) -> None:
        server = self.live.get(name)
        if server is None or not server.leads(part) or part in server.stuck or server.known is None:
            return
        if server.known.assignments[part].handing_off and not server.expelled:
            server.resting.add(part)
            self.outbox.append(ev.PartReleased(name, part, server.known.number))

    @rule()
    def all_hear_and_copy(self) -> None:
        """Deliver all messages but those to the coordinator, which may wait."""
        for name in sorted(self.live):
            while name in self.live and self.live[name].inbox:
                self.adopt(name)
        for name in sorted(self.live):
            for part in range(4):
                self.copy(name, part)

    # --- promises

    @invariant()
    def what_was_acknowledged_is_held(self) -> None:
        placement = getattr(self, "state", None) and self.state.placement
        if not placement:
            return
        for part, holding in enumerate(placement.assignments):
            acked = self.acked.get((placement.generation, part), set())
            for name in (holding.primary, holding.backup):
                seat, server = placement.seat_of(name), self.live.get(name)
                if not name or server is None or seat is None or server.incarnation != seat.incarnation:
                    continue
                if not server.expelled:
                    held = set(server.parts.get(part, []))
                    assert acked <= held, f"{name} lacks {acked - held} of part {part} in {placement}"

    @invariant()
    def a_part_has_its_copies_on_different_servers(self) -> None:
        placement = getattr(self, "state", None) and self.state.placement
        for holding in placement.assignments if placement else ():
            assert len(set(holding.copies)) == len(holding.copies)
            assert all(placement.seat_of(name) is not None for name in holding.copies)


TestPlacements = Placements.TestCase
TestPlacements.settings = settings(max_examples=80, stateful_step_count=80)
