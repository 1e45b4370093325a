"""Decisions as messages to members and agents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.core.fleet import events as fe
from shoal.core.fleet.decide import role_of
from shoal.core.membership import events as ev
from shoal.core.runs import evaluation
from shoal.wire import member_messages as ms
from shoal.wire.api import RoleSpec, RunSpec

PREEMPTED = 75


def to_members(asked: Any) -> tuple[tuple[str, ...], ms.Message] | None:
    """Which members to tell what; `Refuse` is not here, because it concerns one socket and not a name.

    It is one message for all of them, so that it is encoded once.
    """
    match asked:
        case ev.FormWorld(world, to, reason):
            return to, ms.Form(world, reason)
        case ev.ProposeWorld(after, world, to, reason):
            return to, ms.Prepare(after, world, reason)
        case ev.DissolveWorld(number, to, reason):
            return to, ms.Dissolve(number, reason)
        case ev.PlaceParts(placement, to, reason):
            return to, ms.Place(placement, reason)
        case ev.TellGone(to, member, incarnation, reason):
            return to, ms.Gone(member, incarnation, reason)
        case ev.AskRestore(member, reason):
            return (member,), ms.Restore(reason)
        case ev.Expel(member, reason):
            return (member,), ms.Expelled(reason)
        case ev.StopMembers(to, reason, checkpoint, exit_code):
            # For members there are two ways to end: as done, and as to be gone on with, whatever the run ends as.
            return to, ms.Stop(reason, checkpoint, PREEMPTED if exit_code else 0)
        case ev.TellFinished(to, step):
            return to, ms.Finished(step)
        case ev.Grant(member, name):
            return (member,), ms.Granted(name)
        case evaluation.TellStanding(to, standing):
            best = (standing.best, standing.best_step, standing.best_value)
            return to, ms.Standing(standing.step, *best)
        case evaluation.TellCheckpoint(to, step, path):
            return to, ms.Checkpointed(step, path, 0, 0.0)
        case evaluation.TellTrained(to, step):
            return to, ms.Finished(step)
        case ev.TellFulfilled(to, name):
            return to, ms.AlreadyDone(name)
    return None


def start_member(
    asked: fe.StartProcess, spec: RunSpec, settings: Mapping[str, object], url: str, run_dir: str
) -> ms.StartMember:
    """The order to start a process; the agent adds the token file and the host, which differ on every machine."""
    env = {
        **spec.env,
        "SHOAL_URL": url,
        "SHOAL_RUN": asked.run,
        "SHOAL_MEMBER": asked.member,
        "SHOAL_INCARNATION": asked.incarnation,
        "SHOAL_SETTINGS": msgspec.json.encode(dict(settings)).decode(),
        "SHOAL_RUN_DIR": run_dir,
        "SHOAL_MEMBERS_MAX": str(spec.members[1]),
        **_resources(spec.roles.get(role_of(asked.member))),
        **dict(asked.env),
    }
    return ms.StartMember(
        asked.run, asked.member, asked.incarnation, spec.argv, spec.cwd, env, spec.module, asked.restart, spec.project
    )


def _resources(role: RoleSpec | None) -> dict[str, str]:
    """What a process of this role may use, as far as that was said."""
    told = {"SHOAL_CPUS": role.cpus, "SHOAL_MEMORY_BYTES": role.memory_bytes} if role is not None else {}
    return {name: str(value) for name, value in told.items() if value}


def end_member(asked: fe.EndProcess) -> ms.EndMember:
    return ms.EndMember(asked.run, asked.member, asked.incarnation, asked.grace_s, asked.reason)


def event_of(member: str, message: ms.Message) -> ev.Event | evaluation.Evaluated | None:
    """What a member's message says to the membership, None if it says nothing there."""
    match message:
        case ms.Ready(fingerprint, step, restored, speed):
            return ev.BecameReady(member, fingerprint, step, restored, speed)
        case ms.Broken(world, step, suspects, cause):
            return ev.WorldBroke(member, world, step, suspects, cause)
        case ms.Switched(world, step):
            return ev.EnteredWorld(member, world, step)
        case ms.CannotPrepare(world, suspects, cause):
            return ev.PreparationFailed(member, world, suspects, cause)
        case ms.Copied(part, to, since):
            return ev.PartCopied(member, part, to, since)
        case ms.Yielded(part, number):
            return ev.PartYielded(member, part, number)
        case ms.Unreachable(server, number, cause):
            return ev.ServerUnreachable(member, server, number, cause)
        case ms.Leaving(within_s, cause):
            return ev.NoticeGiven(member, within_s, cause)
        case ms.Left(step, world):
            return ev.MemberLeft(member, step, world)
        case ms.Done(step, early):
            return ev.MemberDone(member, step, early)
        case ms.Claim(name):
            return ev.Claimed(member, name)
        case ms.ClaimDone(name):
            return ev.ClaimFulfilled(member, name)
        case ms.Checkpointed(step, path):
            return ev.CheckpointWritten(member, step, path)
        case ms.Decided(step, what, values, reason):
            return ev.Decided(member, step, what, values, reason)
        case ms.Evaluated(step, metrics, best, patience, export):
            # The journal has no words for what is not finite.
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return evaluation.Evaluated(member, step, finite, best, patience, export)
    return None
