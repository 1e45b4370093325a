"""Dispatch: translates instructions into messages, and messages of members into events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from shoal import exit_codes
from shoal.core.fleet import events as fe
from shoal.core.fleet.decide import role_of
from shoal.core.membership import events as ev
from shoal.core.runs import evaluation
from shoal.core.runs.spec import RoleSpec, RunSpec
from shoal.wire import agent_messages
from shoal.wire import member_messages as ms
from shoal.wire.protocol import Message


def to_members(instruction: Any) -> tuple[tuple[str, ...], Message] | None:
    """Return the addressed members and the message for all of them, None if the instruction is not for members.

    `RejectMember` is not included: it is for one connection and not for whichever has the member's name.
    """
    match instruction:
        case ev.FormWorld(world, to, reason):
            return to, ms.EnterWorldMsg(world, reason)
        case ev.ProposeWorld(after, world, to, reason):
            return to, ms.PrepareWorldMsg(after, world, reason)
        case ev.DissolveWorld(number, to, reason):
            return to, ms.DissolveWorldMsg(number, reason)
        case ev.PublishPlacement(placement, to, reason):
            return to, ms.PlacementMsg(placement, reason)
        case ev.AnnounceTrainerLost(to, member, incarnation, reason):
            return to, ms.TrainerLostMsg(member, incarnation, reason)
        case ev.RestoreCheckpoint(member, reason):
            return (member,), ms.RestoreMsg(reason)
        case ev.EvictMember(member, reason):
            return (member,), ms.EvictedMsg(reason)
        case ev.StopMembers(to, reason, checkpoint, exit_code):
            # A member ends as done or as preempted, whatever the exit code of its run.
            return to, ms.StopMsg(reason, checkpoint, exit_codes.RESUMABLE if exit_code else exit_codes.OK)
        case ev.EndTraining(to, step, reason):
            return to, ms.EndTrainingMsg(step, reason)
        case ev.AnnounceFinished(to, step):
            return to, ms.RunFinishedMsg(step)
        case ev.GrantClaim(member, name):
            return (member,), ms.ClaimGrantedMsg(name)
        case evaluation.SendEvaluationStatus(to, status):
            return to, ms.EvaluationStatusMsg(status.step, status.best, status.best_step, status.best_value)
        case evaluation.AnnounceCheckpoint(to, step, path):
            return to, ms.CheckpointWrittenMsg(step, path, 0, 0.0)
        case evaluation.AnnounceTrainingFinished(to, step):
            return to, ms.RunFinishedMsg(step)
        case ev.AnnounceClaimCompleted(to, name):
            return to, ms.ClaimAlreadyDoneMsg(name)
    return None


def start_member(
    start: fe.StartProcess, spec: RunSpec, settings: Mapping[str, object], url: str, run_dir: str
) -> agent_messages.StartMemberMsg:
    """Return the order to start a process; the agent adds its token file and host."""
    env = {
        **spec.env,
        "SHOAL_URL": url,
        "SHOAL_RUN": start.run,
        "SHOAL_MEMBER": start.member,
        "SHOAL_INCARNATION": start.incarnation,
        "SHOAL_SETTINGS": msgspec.json.encode(dict(settings)).decode(),
        "SHOAL_RUN_DIR": run_dir,
        "SHOAL_MEMBERS_MAX": str(spec.members[1]),
        **_resource_limits(spec.roles.get(role_of(start.member))),
        **dict(start.env),
    }
    return agent_messages.StartMemberMsg(
        start.run, start.member, start.incarnation, spec.argv, spec.cwd, env, spec.module, start.restart, spec.project
    )


def _resource_limits(role: RoleSpec | None) -> dict[str, str]:
    """Return the environment that limits a process of this role, without the limits that were not set."""
    limits = {"SHOAL_CPUS": role.cpus, "SHOAL_MEMORY_BYTES": role.memory_bytes} if role is not None else {}
    return {name: str(value) for name, value in limits.items() if value}


def stop_member(stop: fe.StopProcess) -> agent_messages.StopMemberMsg:
    """Return the order to stop a process."""
    return agent_messages.StopMemberMsg(stop.run, stop.member, stop.incarnation, stop.grace_s, stop.reason)


def event_of(member: str, message: Message) -> ev.Event | evaluation.EvaluationReported | None:
    """Return the event of a member's message, None if the message leads to no event."""
    match message:
        case ms.ReadyMsg(fingerprint, step, restored, speed):
            return ev.MemberReady(member, fingerprint, step, restored, speed)
        case ms.WorldBrokenMsg(world, step, suspects, cause):
            return ev.WorldBroken(member, world, step, suspects, cause)
        case ms.WorldEnteredMsg(world, step):
            return ev.WorldEntered(member, world, step)
        case ms.PrepareFailedMsg(world, suspects, cause):
            return ev.WorldPrepareFailed(member, world, suspects, cause)
        case ms.PartCopiedMsg(part, to, since):
            return ev.PartCopied(member, part, to, since)
        case ms.PartReleasedMsg(part, number):
            return ev.PartReleased(member, part, number)
        case ms.ServerUnreachableMsg(server, number, cause):
            return ev.ServerUnreachable(member, server, number, cause)
        case ms.LeavingMsg(within_s, cause):
            return ev.NoticeReceived(member, within_s, cause)
        case ms.LeftMsg(step, world):
            return ev.MemberLeft(member, step, world)
        case ms.DoneMsg(step, early):
            return ev.MemberDone(member, step, early)
        case ms.ClaimMsg(name):
            return ev.ClaimRequested(member, name)
        case ms.ClaimDoneMsg(name):
            return ev.ClaimCompleted(member, name)
        case ms.CheckpointWrittenMsg(step, path):
            return ev.CheckpointWritten(member, step, path)
        case ms.AdjustmentMsg(step, what, values, reason):
            return ev.AdjustmentReported(member, step, what, values, reason)
        case ms.EvaluatedMsg(step, metrics, best, patience, export):
            # JSON, and so the journal, has no infinities and no NaN.
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return evaluation.EvaluationReported(member, step, finite, best, patience, export)
    return None
