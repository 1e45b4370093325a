"""Decisions as messages to members and agents."""

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


def to_members(asked: Any) -> tuple[tuple[str, ...], Message] | None:
    """Which members to tell what; `Refuse` is not here, because it concerns one socket and not a name.

    It is one message for all of them, so that it is encoded once.
    """
    match asked:
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
            # For members there are two ways to end: as done, and as to be gone on with, whatever the run ends as.
            return to, ms.StopMsg(reason, checkpoint, exit_codes.RESUMABLE if exit_code else exit_codes.OK)
        case ev.AnnounceFinished(to, step):
            return to, ms.RunFinishedMsg(step)
        case ev.GrantClaim(member, name):
            return (member,), ms.ClaimGrantedMsg(name)
        case evaluation.SendEvaluationStatus(to, standing):
            best = (standing.best, standing.best_step, standing.best_value)
            return to, ms.EvaluationStatusMsg(standing.step, *best)
        case evaluation.AnnounceCheckpoint(to, step, path):
            return to, ms.CheckpointWrittenMsg(step, path, 0, 0.0)
        case evaluation.AnnounceTrainingFinished(to, step):
            return to, ms.RunFinishedMsg(step)
        case ev.AnnounceClaimCompleted(to, name):
            return to, ms.ClaimAlreadyDoneMsg(name)
    return None


def start_member(
    asked: fe.StartProcess, spec: RunSpec, settings: Mapping[str, object], url: str, run_dir: str
) -> agent_messages.StartMemberMsg:
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
    return agent_messages.StartMemberMsg(
        asked.run, asked.member, asked.incarnation, spec.argv, spec.cwd, env, spec.module, asked.restart, spec.project
    )


def _resources(role: RoleSpec | None) -> dict[str, str]:
    """What a process of this role may use, as far as that was said."""
    told = {"SHOAL_CPUS": role.cpus, "SHOAL_MEMORY_BYTES": role.memory_bytes} if role is not None else {}
    return {name: str(value) for name, value in told.items() if value}


def end_member(asked: fe.StopProcess) -> agent_messages.StopMemberMsg:
    return agent_messages.StopMemberMsg(asked.run, asked.member, asked.incarnation, asked.grace_s, asked.reason)


def event_of(member: str, message: Message) -> ev.Event | evaluation.EvaluationReported | None:
    """What a member's message says to the membership, None if it says nothing there."""
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
            # The journal has no words for what is not finite.
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return evaluation.EvaluationReported(member, step, finite, best, patience, export)
    return None
