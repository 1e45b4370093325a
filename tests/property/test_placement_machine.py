"""Servers join, die, hang and wake up, and messages arrive late: losing one server never loses an acknowledged write.

The servers here do what `shoal.worker.parameter_server.server` does, without sockets: a primary acknowledges a write
only when its backup has accepted it, or when it has received a placement without that backup.
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

ADDRESS = Address("h", 1)
NAMES = st.sampled_from(["s0", "s1", "s2"])


@dataclass
class Server:
    """A server as it sees itself."""

    name: str
    incarnation: str
    placement: Placement | None = None
    parts: dict[int, list[int]] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    copies: dict[int, dict[str, int]] = field(default_factory=dict)
    unacknowledged: dict[int, tuple[int, str, int]] = field(default_factory=dict)
    inbox: deque[Any] = field(default_factory=deque)
    evicted: bool = False

    def assignment(self, part: int) -> PartAssignment | None:
        return (
            self.placement.assignments[part]
            if self.placement is not None and part < len(self.placement.assignments)
            else None
        )

    def leads(self, part: int) -> bool:
        assignment = self.assignment(part)
        return assignment is not None and assignment.primary == self.name and part in self.parts


class Placements(RuleBasedStateMachine):
    @initialize(servers=st.integers(1, 3))
    def start(self, servers: int) -> None:
        self.state = MembershipState(MembershipSettings(servers=servers, regroup_s=0.0))
        self.alive: dict[str, Server] = {}
        self.now = 1000.0
        self.count = 0
        self.acked: dict[tuple[int, int], set[int]] = {}
        self.outbox: list[ev.Event] = []
        self.decide(ev.MemberConnected("t", "t", ADDRESS))
        self.decide(ev.MemberReady("t", "m", None))

    # --- the coordinator

    def decide(self, event: ev.Event) -> None:
        self.state, instructions = sv.decide(self.state, event, self.now)
        self.carry_out(instructions)

    def carry_out(self, instructions: tuple[ev.Instruction, ...]) -> None:
        for instruction in instructions:
            if isinstance(instruction, ev.PublishPlacement):
                for name in instruction.to:
                    if name in self.alive and not self.alive[name].evicted:
                        self.alive[name].inbox.append(instruction.placement)
            elif isinstance(instruction, ev.RestoreCheckpoint):
                # There is no checkpoint here: training starts over.
                self.outbox.append(ev.MemberReady(instruction.member, "m", None, restored=True))

    @rule()
    def coordinator_receives_a_message(self) -> None:
        if self.outbox:
            event = self.outbox.pop(0)
            if getattr(event, "member", "") in self.state.members:
                self.decide(event)

    @rule(name=NAMES)
    def server_joins(self, name: str) -> None:
        if name not in self.alive:
            self.count += 1
            self.alive[name] = Server(name, str(self.count))
            self.decide(ev.MemberConnected(name, str(self.count), ADDRESS, role="server"))
            self.decide(ev.MemberReady(name, "m", None))

    @rule(name=NAMES)
    def server_dies(self, name: str) -> None:
        if self.alive.pop(name, None) is not None:
            self.decide(ev.MemberLost(name, "killed"))

    @rule(name=NAMES)
    def server_hangs(self, name: str) -> None:
        """Let the lease of a server expire while the process continues with its last placement."""
        server = self.alive.get(name)
        if server is not None and not server.evicted:
            server.evicted = True
            server.inbox.clear()
            self.decide(ev.MemberLost(name, "silent"))

    @rule(name=NAMES)
    def server_wakes_up(self, name: str) -> None:
        server = self.alive.get(name)
        if server is not None and server.evicted:
            self.alive[name] = Server(name, server.incarnation)
            self.decide(ev.MemberConnected(name, server.incarnation, ADDRESS, role="server"))
            self.decide(ev.MemberReady(name, "m", None))

    @rule(name=NAMES)
    def server_gets_notice(self, name: str) -> None:
        if name in self.alive and name in self.state.members:
            self.decide(ev.NoticeReceived(name, 30.0, "spot"))

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0
        self.decide(ev.TimerFired("regroup"))

    # --- the servers

    @rule(name=NAMES)
    def server_receives_a_placement(self, name: str) -> None:
        server = self.alive.get(name)
        if server is None or not server.inbox:
            return
        placement = server.inbox.popleft()
        if server.placement is not None and server.placement.number >= placement.number:
            return
        before, server.placement = server.placement, placement
        if before is not None and before.generation != placement.generation:
            server.parts.clear()
            server.unacknowledged.clear()
            server.copies.clear()
        own_parts = placement.held_by(name)
        if before is not None and not own_parts:
            leaving = name in self.state.members and self.state.members[name].leaving
            if leaving:
                del self.alive[name]
                self.decide(ev.MemberLeft(name, None))
                return
        for part in [p for p in server.parts if p not in own_parts]:
            del server.parts[part]
            server.unacknowledged.pop(part, None)
        for part in own_parts:
            self._apply_assignment(server, part, placement)

    def _apply_assignment(self, server: Server, part: int, placement: Placement) -> None:
        assignment = placement.assignments[part]
        if assignment.primary != server.name:
            server.unacknowledged.pop(part, None)
            server.copies.pop(part, None)
            return
        server.parts.setdefault(part, [])
        copies = server.copies.setdefault(part, {})
        for copy, since in list(copies.items()):
            if not (copy == assignment.backup or (copy == assignment.learner and since == assignment.since)):
                del copies[copy]
        if assignment.backup:
            copies.setdefault(assignment.backup, assignment.since)
        if part in server.unacknowledged:
            write, copy, since = server.unacknowledged[part]
            if not (copy == assignment.backup or (copy == assignment.learner and since == assignment.since)):
                del server.unacknowledged[part]
                self.acked.setdefault((placement.generation, part), set()).add(write)
        if not assignment.handing_off:
            server.released.discard(part)

    def _accepts(self, primary: Server, name: str, part: int) -> bool:
        """Return whether a copy accepts an update of this primary."""
        other = self.alive.get(name)
        if other is None or other.placement is None or primary.placement is None:
            return False
        assignment = other.assignment(part)
        if other.placement.number < primary.placement.number or assignment is None:
            return False
        same_primary = other.placement.generation == primary.placement.generation and assignment.primary == primary.name
        return same_primary and name in (assignment.backup, assignment.learner) and part in other.parts

    @rule(name=NAMES, part=st.integers(0, 3))
    def primary_writes(self, name: str, part: int) -> None:
        server = self.alive.get(name)
        if server is None or not server.leads(part) or part in server.unacknowledged or part in server.released:
            return
        assert server.placement is not None
        self.count += 1
        refused = ""
        for copy in server.copies.get(part, {}):
            held = server.parts[part]
            if self._accepts(server, copy, part) and self.alive[copy].parts[part] == held:
                self.alive[copy].parts[part] = [*held, self.count]
            else:
                refused = copy
        server.parts[part] = [*server.parts[part], self.count]
        if not refused:
            self.acked.setdefault((server.placement.generation, part), set()).add(self.count)
        else:
            server.unacknowledged[part] = (self.count, refused, server.copies[part][refused])
            if not server.evicted:
                self.outbox.append(ev.ServerUnreachable(name, refused, server.placement.number, "refused"))

    @precondition(lambda self: any(s.unacknowledged for s in self.alive.values()))
    @rule(name=NAMES)
    def primary_reports_again(self, name: str) -> None:
        server = self.alive.get(name)
        if server is not None and server.placement is not None and not server.evicted:
            for _, copy, _ in server.unacknowledged.values():
                self.outbox.append(ev.ServerUnreachable(name, copy, server.placement.number, "refused"))

    @rule(name=NAMES, part=st.integers(0, 3))
    def primary_copies_a_part(self, name: str, part: int) -> None:
        """Send the whole part to the learner, under the part's lock."""
        server = self.alive.get(name)
        if server is None or not server.leads(part) or part in server.unacknowledged or server.placement is None:
            return
        assignment = server.placement.assignments[part]
        learner = self.alive.get(assignment.learner)
        if not assignment.learner or learner is None or learner.placement is None:
            return
        other = learner.assignment(part)
        if (
            learner.placement.number < server.placement.number
            or other is None
            or learner.placement.generation != server.placement.generation
        ):
            return
        if other.primary != name or learner.name not in (other.backup, other.learner):
            return
        learner.parts[part] = list(server.parts[part])
        server.copies.setdefault(part, {})[learner.name] = assignment.since
        if not server.evicted:
            self.outbox.append(ev.PartCopied(name, part, learner.name, assignment.since))

    @rule(name=NAMES, part=st.integers(0, 3))
    def primary_releases_a_part(self, name: str, part: int) -> None:
        server = self.alive.get(name)
        if server is None or not server.leads(part) or part in server.unacknowledged or server.placement is None:
            return
        if server.placement.assignments[part].handing_off and not server.evicted:
            server.released.add(part)
            self.outbox.append(ev.PartReleased(name, part, server.placement.number))

    @rule()
    def placements_arrive_and_parts_are_copied(self) -> None:
        """Deliver all messages except those to the coordinator, which may wait."""
        for name in sorted(self.alive):
            while name in self.alive and self.alive[name].inbox:
                self.server_receives_a_placement(name)
        for name in sorted(self.alive):
            for part in range(4):
                self.primary_copies_a_part(name, part)

    # --- invariants

    @invariant()
    def acknowledged_writes_are_kept(self) -> None:
        placement = getattr(self, "state", None) and self.state.placement
        if not placement:
            return
        for part, assignment in enumerate(placement.assignments):
            acked = self.acked.get((placement.generation, part), set())
            for name in (assignment.primary, assignment.backup):
                seat, server = placement.seat_of(name), self.alive.get(name)
                if not name or server is None or seat is None or server.incarnation != seat.incarnation:
                    continue
                if not server.evicted:
                    held = set(server.parts.get(part, []))
                    assert acked <= held, f"{name} lacks {acked - held} of part {part} in {placement}"

    @invariant()
    def copies_of_a_part_are_on_different_servers(self) -> None:
        placement = getattr(self, "state", None) and self.state.placement
        for assignment in placement.assignments if placement else ():
            assert len(set(assignment.copies)) == len(assignment.copies)
            assert all(placement.seat_of(name) is not None for name in assignment.copies)


TestPlacements = Placements.TestCase
TestPlacements.settings = settings(max_examples=80, stateful_step_count=80)
