"""Which waits are over: leases, reconnections, stalls, gatherings."""

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

# So many beats a second are as much as a coordinator wants to hear of one run.
BEATS_PER_S = 1000
BEATS_PER_LEASE = 4
# What it takes members at most to find a coordinator again that was cut off, and it to let one of them and its agent
# in, with TLS, on a slow machine.
RECONNECT_S, RETURN_S = 4.0, 0.01
# All who are silent for longer are lost after all, before their agents are given up and others are hired.
OWN_SILENCE_S = 15.0


def heartbeat_s(wished_s: float, members: int, lease_s: float) -> float:
    """How often each of so many members renews its lease: as wished, or more rarely, but often enough for its lease.

    >>> heartbeat_s(0.5, 8, 3.0), heartbeat_s(0.5, 600, 3.0), heartbeat_s(0.5, 5000, 3.0)
    (0.5, 0.6, 0.75)
    """
    return max(wished_s, min(members / BEATS_PER_S, lease_s / BEATS_PER_LEASE))


def silence_limit_s(heartbeat_s: float, lease_s: float) -> float:
    """How long nobody is heard before the silence is the coordinator's own; no member's lease can have run out by then.

    With beats so rare that one who is left could be silent for as long, it never is.

    >>> silence_limit_s(0.5, 3.0), silence_limit_s(0.75, 3.0), silence_limit_s(2.0, 3.0)
    (2.0, 1.5, inf)
    """
    quiet = lease_s - 2.0 * heartbeat_s
    return quiet if quiet > 1.5 * heartbeat_s else inf


@dataclass(frozen=True, slots=True)
class CoordinatorReachability:
    """When a coordinator last received anything, and when it did so again after a silence of all members.

    A coordinator that is cut off hears no member at all, while they train on without it. `restored_at` is the end of
    the latest silence longer than `silence_limit_s`.
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
        """Return whether a member's silence is most likely the coordinator's own fault.

        It is when no member is heard at all, or connections were only just restored. A member whose connection was
        closed is not excused by a general silence: the coordinator heard of that.
        """
        if now - self.restored_at <= max(state.settings.lease_s, RECONNECT_S) + RETURN_S * len(state.members):
            return True
        return member.connected and self.silence_limit_s < now - self.last_received <= OWN_SILENCE_S


def due(
    state: MembershipState,
    beats: Mapping[str, LastHeartbeat],
    now: float,
    hearing: CoordinatorReachability | None = None,
) -> tuple[ev.Event, ...]:
    """The waits that are over, as events."""
    hearing = hearing or CoordinatorReachability(now)
    if state.finished:
        return tuple(_lost(state, _awaited(state), beats, now, hearing))
    fired: list[ev.Event] = list(_lost(state, state.members.values(), beats, now, hearing))
    fired.extend(ev.MemberLost(name, reason, hung=True) for name, reason in _stalled(state, beats, now))
    if state.regroup_until is not None and now >= state.regroup_until:
        fired.append(ev.TimerFired("regroup"))
    elif any(0.0 < m.quarantined_until <= now for m in state.members.values()):
        fired.append(ev.TimerFired("quarantine"))
    if state.settings.replaces_members and state.stopping is None and _last_call(state, now):
        fired.append(ev.TimerFired("notice"))
    if state.proposal is not None and state.repeat_at is not None and now >= state.repeat_at:
        fired.append(ev.TimerFired("proposal"))
    return tuple(fired)


def _awaited(state: MembershipState) -> list[MemberState]:
    """Those who do something that another waits for; when all is trained, nobody else has to be there any more."""
    names = {claim.holder for claim in state.claims.values() if claim.waiting and not claim.completed}
    return [member for name, member in state.members.items() if name in names]


def _lost(
    state: MembershipState,
    members: Iterable[MemberState],
    beats: Mapping[str, LastHeartbeat],
    now: float,
    hearing: CoordinatorReachability,
) -> Iterator[ev.MemberLost]:
    fresh_since = now - state.settings.lease_s
    for member in members:
        beat = beats.get(member.name)
        fresh = member.since >= fresh_since or (beat is not None and beat.at >= fresh_since)
        if fresh and member.disconnected_since is None:
            continue
        reason = _why_lost(state, member, beat, now)
        if reason and not hearing.excuses(member, state, now):
            yield ev.MemberLost(member.name, reason)


def _last_call(state: MembershipState, now: float) -> bool:
    """Whether all who train were told to go, and one of them cannot wait any longer for somebody to take over."""
    staying = any(m.status == TRAINING and not m.leaving for m in state.members.values())
    return not staying and any(m.leaving and m.stop_by <= now for m in state.members.values())


def _why_lost(state: MembershipState, member: MemberState, beat: LastHeartbeat | None, now: float) -> str:
    silent_s = now - max(beat.at if beat else 0.0, member.since)
    if silent_s > state.settings.lease_s:
        return f"its lease ran out: silent for {silent_s:.1f} s"
    away_s = now - member.disconnected_since if member.disconnected_since is not None else 0.0
    if member.status in (REGROUPING, WAITING, STARTING) and away_s > state.settings.reconnect_s:
        return f"it did not come back within {state.settings.reconnect_s:g} s"
    return ""


def _may_stall(world: World, beats: Mapping[str, LastHeartbeat], hang_timeout_s: float) -> bool:
    """Whether somebody waits in the exchange, and nobody has for a short time only; asked twenty times a second."""
    waits = False
    for seat in world.seats:
        beat = beats.get(seat.member)
        if beat is None:
            return False
        if beat.phase == "exchange":
            if beat.phase_age_s < hang_timeout_s:
                return False
            waits = True
    return waits


def _stalled(state: MembershipState, beats: Mapping[str, LastHeartbeat], now: float) -> list[tuple[str, str]]:
    """Members that are stuck outside the exchange while all others have long waited for them in it."""
    if state.placement is not None:
        return _stuck_with_a_ticket(state, beats, now)
    if state.world is None or not _may_stall(state.world, beats, state.settings.hang_timeout_s):
        return []
    seen = {s.member: beats[s.member] for s in state.world.seats if s.member in beats}
    waiting = {n: b for n, b in seen.items() if b.phase == "exchange"}
    stuck = {n: b for n, b in seen.items() if b.phase != "exchange"}
    if not waiting or not stuck or len(seen) < state.world.size:
        return []
    limit_s = max(state.settings.hang_timeout_s, 20.0 * max(b.usual_step_s for b in seen.values()))
    if min(b.phase_age_s for b in waiting.values()) < limit_s:
        return []
    return [
        (name, f"it has been in {beat.phase or 'an unknown phase'} for {beat.phase_age_s:.0f} s while the others wait")
        for name, beat in stuck.items()
        if beat.phase_age_s >= limit_s and now - beat.at < state.settings.lease_s
    ]


def _stuck_with_a_ticket(
    state: MembershipState, beats: Mapping[str, LastHeartbeat], now: float
) -> list[tuple[str, str]]:
    """Trainers of a run with servers that do not wait for anybody, and for whom another has long waited."""
    seen = {name: beats[name] for name, m in state.members.items() if m.status == TRAINING and name in beats}
    if not any(beat.waits_for and beat.phase_age_s >= state.settings.hang_timeout_s for beat in seen.values()):
        return []
    limit_s = max(state.settings.hang_timeout_s, 20.0 * max(beat.usual_step_s for beat in seen.values()))
    awaited = {name for beat in seen.values() if beat.phase_age_s >= limit_s for name in beat.waits_for}
    return [
        (
            name,
            f"it has been in {beat.phase or 'an unknown phase'} for {beat.phase_age_s:.0f} s while others wait for it",
        )
        for name, beat in seen.items()
        if name in awaited
        and not beat.waits_for
        and beat.phase_age_s >= limit_s
        and now - beat.at < state.settings.lease_s
    ]
