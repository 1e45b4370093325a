"""Leases and timers: which members are lost, which are hung, and which other waits are over.

Each member holds a lease that every heartbeat renews. `due(state, heartbeats, now)` is called many times a second and
returns an event for each timer that has expired. It never changes the state: `decide` does that once the event is
journaled. Three failures look alike from the coordinator, and are told apart here.

**Silence.** A member whose process is stopped, or whose machine or network died, sends nothing. Its lease expires after
`lease_s`, and it is lost. A closed connection alone loses no member, because the member may connect again, from another
address too. But if the others cannot train before it answers, they wait only `reconnect_s` for it. Silence while the
coordinator itself was down does not count: `CoordinatorRestarted` moves the start of every lease to that moment, and
further for many members, because they cannot all be let in at once.

**Hang.** A member that sends heartbeats may still make no progress: a deadlock in its data loader, a dead file system.
Time alone does not prove that, since a step may take an hour. But the others wait in the exchange, and their heartbeats
say so. If they have waited there for `hang_timeout_s`, and for 20 usual steps, each member that is not in the exchange,
and has been in one phase for as long, is hung. If all members wait in the exchange, none is: they wait for the network.
In a run with parameter servers a trainer waits for the slowest clock only, so a member is hung if another names it as
the one it waits for, and it does not wait for anything itself.

**The coordinator is cut off.** Its own network may fail while the members train on without it. It then hears none of
them, and must not count them all as lost when the network is back. `CoordinatorReachability` keeps the time of the last
message from any member. If nothing at all arrived for `silence_limit_s`, which is less than a lease, no connected
member is lost for its silence. The excuse ends after `OWN_SILENCE_S`: then all members may really be gone, and
other machines should be requested. When messages arrive again, members have a full lease to reconnect. A closed
connection is not excused while the silence lasts, because the coordinator did hear of that member.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from shoal.core.membership import events as ev
from shoal.core.membership.state import (
    REGROUPING,
    STARTING,
    TRAINING,
    WAITING,
    LastHeartbeat,
    MembershipState,
    MemberState,
)
from shoal.core.world import World

# The load that one run may put on a coordinator.
HEARTBEATS_PER_S = 1000
# Many members send fewer heartbeats, but no fewer than these within a lease.
THINNED_HEARTBEATS_PER_LEASE = 4
# How long members need at most to find a coordinator again that was cut off, and how long it takes to let one of them
# and its agent in, with TLS, on a slow machine.
RECONNECT_S, RETURN_S = 4.0, 0.01
# After a longer silence all members count as lost, before their agents are given up and other machines are requested.
OWN_SILENCE_S = 15.0
# A hang is longer than this many usual steps.
HANG_STEPS = 20.0


def heartbeat_s(wished_s: float, members: int, lease_s: float) -> float:
    """Return the seconds between two heartbeats of a member: as configured, or longer if there are many members.

    >>> heartbeat_s(0.5, 8, 3.0), heartbeat_s(0.5, 600, 3.0), heartbeat_s(0.5, 5000, 3.0)
    (0.5, 0.6, 0.75)
    """
    return max(wished_s, min(members / HEARTBEATS_PER_S, lease_s / THINNED_HEARTBEATS_PER_LEASE))


def silence_limit_s(heartbeat_s: float, lease_s: float) -> float:
    """Return the seconds of silence of all members after which the coordinator takes itself for cut off.

    No lease can have expired by then. The limit is infinite if heartbeats are so rare that a single remaining member
    could be silent for as long.

    >>> silence_limit_s(0.5, 3.0), silence_limit_s(0.75, 3.0), silence_limit_s(2.0, 3.0)
    (2.0, 1.5, inf)
    """
    limit_s = lease_s - 2.0 * heartbeat_s
    return limit_s if limit_s > 1.5 * heartbeat_s else inf


@dataclass(frozen=True, slots=True)
class CoordinatorReachability:
    """When the coordinator last received anything of a run, and when it did so again after a long silence.

    `restored_at` is the end of the latest silence longer than `silence_limit_s`.
    """

    last_received: float
    silence_limit_s: float = inf
    restored_at: float = -inf

    def received(self, at: float) -> CoordinatorReachability:
        """Return this record after a message at time `at`; an older time changes nothing."""
        if at <= self.last_received:
            return self
        silent = at - self.last_received > self.silence_limit_s
        return replace(self, last_received=at, restored_at=at if silent else self.restored_at)

    def excuses(self, member: MemberState, state: MembershipState, now: float) -> bool:
        """Return whether a member's silence is most likely the coordinator's own."""
        if now - self.restored_at <= max(state.settings.lease_s, RECONNECT_S) + RETURN_S * len(state.members):
            return True
        return member.connected and self.silence_limit_s < now - self.last_received <= OWN_SILENCE_S


def due(
    state: MembershipState,
    heartbeats: Mapping[str, LastHeartbeat],
    now: float,
    reachability: CoordinatorReachability | None = None,
) -> tuple[ev.Event, ...]:
    """Return an event for every timer that has expired."""
    reachability = reachability or CoordinatorReachability(now)
    if state.finished:
        return tuple(_lost(state, _claim_holders(state), heartbeats, now, reachability))
    fired: list[ev.Event] = list(_lost(state, state.members.values(), heartbeats, now, reachability))
    fired.extend(ev.MemberLost(name, reason, hung=True) for name, reason in _hung(state, heartbeats, now))
    if state.regroup_until is not None and now >= state.regroup_until:
        fired.append(ev.TimerFired("regroup"))
    elif any(0.0 < m.quarantined_until <= now for m in state.members.values()):
        fired.append(ev.TimerFired("quarantine"))
    if state.settings.replaces_members and state.stopping is None and _must_stop(state, now):
        fired.append(ev.TimerFired("notice"))
    if state.form_at is not None and now >= state.form_at:
        fired.append(ev.TimerFired("retry"))
    if state.proposal is not None and state.repeat_at is not None and now >= state.repeat_at:
        fired.append(ev.TimerFired("proposal"))
    return tuple(fired)


def _claim_holders(state: MembershipState) -> list[MemberState]:
    """Return the members that hold a claim others wait for: after the training, only they have to stay alive."""
    names = {claim.holder for claim in state.claims.values() if claim.waiting and not claim.completed}
    return [member for name, member in state.members.items() if name in names]


def _lost(
    state: MembershipState,
    members: Iterable[MemberState],
    heartbeats: Mapping[str, LastHeartbeat],
    now: float,
    reachability: CoordinatorReachability,
) -> Iterator[ev.MemberLost]:
    fresh_since = now - state.settings.lease_s
    for member in members:
        heartbeat = heartbeats.get(member.name)
        fresh = member.since >= fresh_since or (heartbeat is not None and heartbeat.at >= fresh_since)
        if fresh and member.disconnected_since is None:
            continue
        lost = _loss_of(state, member, heartbeat, now)
        if lost is not None and not reachability.excuses(member, state, now):
            yield lost


def _loss_of(
    state: MembershipState, member: MemberState, heartbeat: LastHeartbeat | None, now: float
) -> ev.MemberLost | None:
    silent_s = now - max(heartbeat.at if heartbeat else 0.0, member.since)
    if silent_s > state.settings.lease_s:
        return ev.MemberLost(member.name, f"lease expired after {silent_s:.1f} s of silence", silent=True)
    away_s = now - member.disconnected_since if member.disconnected_since is not None else 0.0
    if member.status in (REGROUPING, WAITING, STARTING) and away_s > state.settings.reconnect_s:
        return ev.MemberLost(member.name, f"it did not reconnect within {state.settings.reconnect_s:g} s")
    return None


def _must_stop(state: MembershipState, now: float) -> bool:
    """Return whether all that train have notice, and one of them cannot wait for a replacement any longer."""
    staying = any(m.status == TRAINING and not m.leaving for m in state.members.values())
    return not staying and any(m.leaving and m.stop_by <= now for m in state.members.values())


def _hung(state: MembershipState, heartbeats: Mapping[str, LastHeartbeat], now: float) -> list[tuple[str, str]]:
    """Return the members that hold up all others, each with a reason."""
    if state.placement is not None:
        return _hung_with_ticket(state, heartbeats, now)
    if state.world is None or not _may_hang(state.world, heartbeats, state.settings.hang_timeout_s):
        return []
    latest = {s.member: heartbeats[s.member] for s in state.world.seats if s.member in heartbeats}
    waiting = {n: b for n, b in latest.items() if b.phase == "exchange"}
    busy = {n: b for n, b in latest.items() if b.phase != "exchange"}
    if not waiting or not busy or len(latest) < state.world.size:
        return []
    limit_s = _hang_limit_s(state, latest.values())
    if min(b.phase_age_s for b in waiting.values()) < limit_s:
        return []
    return [
        (name, _hang_reason(heartbeat, "all other members wait"))
        for name, heartbeat in busy.items()
        if heartbeat.phase_age_s >= limit_s and now - heartbeat.at < state.settings.lease_s
    ]


def _may_hang(world: World, heartbeats: Mapping[str, LastHeartbeat], hang_timeout_s: float) -> bool:
    """Return whether some members wait in the exchange, all of them for long: a cheap test, made 20 times a second."""
    waits = False
    for seat in world.seats:
        heartbeat = heartbeats.get(seat.member)
        if heartbeat is None:
            return False
        if heartbeat.phase == "exchange":
            if heartbeat.phase_age_s < hang_timeout_s:
                return False
            waits = True
    return waits


def _hung_with_ticket(
    state: MembershipState, heartbeats: Mapping[str, LastHeartbeat], now: float
) -> list[tuple[str, str]]:
    """Return the trainers of a run with servers that wait for nothing themselves, but hold up another trainer."""
    training = [name for name, m in state.members.items() if m.status == TRAINING]
    latest = {name: heartbeats[name] for name in training if name in heartbeats}
    if not any(h.waits_for and h.phase_age_s >= state.settings.hang_timeout_s for h in latest.values()):
        return []
    limit_s = _hang_limit_s(state, latest.values())
    awaited = {name for h in latest.values() if h.phase_age_s >= limit_s for name in h.waits_for}
    return [
        (name, _hang_reason(h, "other trainers wait for it"))
        for name, h in latest.items()
        if name in awaited and not h.waits_for and h.phase_age_s >= limit_s and now - h.at < state.settings.lease_s
    ]


def _hang_limit_s(state: MembershipState, heartbeats: Iterable[LastHeartbeat]) -> float:
    return max(state.settings.hang_timeout_s, HANG_STEPS * max(heartbeat.usual_step_s for heartbeat in heartbeats))


def _hang_reason(heartbeat: LastHeartbeat, waiting: str) -> str:
    return f"stuck in {heartbeat.phase or 'an unknown phase'} for {heartbeat.phase_age_s:.0f} s while {waiting}"
