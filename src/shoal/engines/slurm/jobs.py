"""Slurm's jobs as allocations: parses squeue, and says what its states and reasons mean; pure.

Slurm has two dozen states; an allocation has three. Most are obvious (`WAITING`, `RUNNING`, the rest is gone). The one
that is not is COMPLETING: it precedes the end of a job, but also its requeue, and then the allocation is not gone but
waiting. Texts are for users, with Slurm's own word in parentheses, so that they can look it up.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.engines.engine import AllocationStatus

# The name comes last: it is the only field that may contain the separator, in jobs of others.
FIELDS = (
    "JobID",
    "State",
    "Reason",
    "StartTime",
    "EndTime",
    "PreemptTime",
    "RestartCnt",
    "exit_code",
    "NodeList",
    "Name",
)
FORMAT = ",".join(f"{field}:|" for field in FIELDS)
BEGIN = "BeginTime"
# Slurm delays a requeued job by two minutes. Ten seconds are enough: messages about the old start, which are still on
# their way to the node, must not hit the new one.
SLURM_DELAY_S = 150.0
REQUEUE_DELAY_S = 10
# The expected end of a job that is being requeued lies at least its time limit, a minute or more, in the future.
AHEAD_S = 30.0

WAITING = ("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")

ENDS = {
    "BOOT_FAIL": "its node did not boot",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "it ended on its own",
    "COMPLETING": "it is ending",
    "DEADLINE": "it could not have ended before its deadline",
    "FAILED": "it failed",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "it exceeded its memory limit",
    "PREEMPTED": "it was preempted by another job",
    "TIMEOUT": "it reached its time limit",
}

WAITS = {
    "BeginTime": "its start time has not come",
    "Dependency": "an earlier job of this name is still running",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held: scontrol release starts it",
    "Licenses": "licenses are in use",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        "all nodes that it could run on are down, drained or reserved"
    ),
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition accepts no jobs",
    "PartitionNodeLimit": "forever: the partition does not allow that many nodes",
    "PartitionTimeLimit": "forever: the partition does not allow a time limit that long",
    "Priority": "other jobs have priority",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "Resources": "no node is free",
    "AccountNotAllowed": "forever: the partition does not allow the account",
    "BadConstraints": "forever: no node satisfies constraint",
    "InvalidAccount": "forever: the account is not valid",
    "InvalidQOS": "forever: the qos is not valid",
    "QOSNotAllowed": "forever: the partition does not allow the qos",
}
LIMIT = re.compile(r"(Assoc|QOS)\w*(Max|Grp|Min|Usage)\w*")


@dataclass(frozen=True, slots=True)
class SlurmJobRow:
    """Line of squeue's output. `status` is as wait() returns it; `start` of a waiting job is the earliest start."""

    number: str
    state: str
    reason: str
    start: float | None
    end: float | None
    preempted: float | None
    restarts: int
    status: int
    node: str
    name: str


def job_name(tag: str, allocation: str) -> str:
    """Return the name of an allocation's job, by which it is found again and cancelled."""
    name = f"shoal-{tag}-{allocation}"
    if not re.fullmatch(r"[\w.:-]+", name):
        raise ValueError(f"invalid job name {name!r}")
    return name


def parse(text: str) -> list[SlurmJobRow]:
    """Return the jobs that squeue printed in `FORMAT`."""
    return [_job(line) for line in text.splitlines() if line.count("|") >= len(FIELDS)]


def _job(line: str) -> SlurmJobRow:
    number, state, reason, start, end, preempted, restarts, status, node, name = line.split("|", len(FIELDS) - 1)
    return SlurmJobRow(
        number=number,
        # "CANCELLED by 1000" and the like.
        state=state.partition(" ")[0],
        reason="" if reason in ("None", "(null)") else reason,
        start=timestamp(start),
        end=timestamp(end),
        preempted=timestamp(preempted),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        status=int(status) if status.isdecimal() else 0,
        node="" if node == "(null)" else node,
        name=name.removesuffix("|"),
    )


def kill_wait_s(config: str) -> float | None:
    """Return the time between SIGTERM and SIGKILL from the output of `scontrol show config`; None if absent."""
    match = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    return float(match[1]) if match else None


def timestamp(text: str) -> float | None:
    """Return a time that Slurm printed as seconds since the epoch; None for N/A, NONE or Unknown.

    Accepts both SLURM_TIME_FORMAT=%s and the default format.
    """
    text = text.strip()
    if text.isdecimal():
        return float(text)
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def statuses(jobs: Iterable[SlurmJobRow], tag: str, now: float) -> list[AllocationStatus]:
    """Return the allocations with this tag, each once.

    An allocation has two jobs if Slurm accepted a submission without confirming it: the second waits for the first.
    """
    prefix = job_name(tag, "")
    best: dict[str, tuple[tuple[int, int], AllocationStatus]] = {}
    for job in jobs:
        if not job.name.startswith(prefix):
            continue
        status = _status(job, job.name.removeprefix(prefix), now)
        rank = (("running", "waiting", "gone").index(status.state), -int(job.number) if job.number.isdecimal() else 0)
        if status.allocation not in best or rank < best[status.allocation][0]:
            best[status.allocation] = (rank, status)
    return [status for _, status in sorted(best.values(), key=lambda pair: pair[1].allocation)]


def _status(job: SlurmJobRow, allocation: str, now: float) -> AllocationStatus:
    if job.state in RUNNING:
        why = "Slurm preempts it for another job" if job.preempted else f"Slurm job {job.number} on {job.node}"
        return AllocationStatus(allocation, job.name, "running", why, ends_at=job.end)
    if job.state in WAITING or is_requeueing(job, now):
        return AllocationStatus(allocation, job.name, "waiting", waits_for(job))
    return AllocationStatus(allocation, job.name, "gone", how_it_ended(job))


def is_requeueing(job: SlurmJobRow, now: float) -> bool:
    """Return whether a job ends only to be queued again: then its end is unknown or far in the future."""
    return job.state == "COMPLETING" and (job.end is None or job.end > now + AHEAD_S)


def is_delayed(job: SlurmJobRow, now: float) -> bool:
    """Return whether a job waits only for Slurm's requeue delay, and longer than necessary."""
    delayed = job.state == "PENDING" and job.reason == BEGIN and job.restarts > 0
    return delayed and job.start is not None and 2 * REQUEUE_DELAY_S < job.start - now < SLURM_DELAY_S


def waits_for(job: SlurmJobRow) -> str:
    """Return what a job waits for, followed by Slurm's own word for it."""
    reason = job.reason or {"PENDING": ""}.get(job.state, job.state)
    key = reason.partition(",")[0]
    words = WAITS.get(key, "")
    if job.state == "SUSPENDED":
        words, reason = "Slurm has suspended it", job.state
    elif job.state == "CONFIGURING":
        words, reason = "its node is being prepared", job.state
    elif is_requeueing(job, float("-inf")):
        words, reason = "it is ending on its old node", job.state
    elif not words and LIMIT.fullmatch(key):
        words = "a limit of the account or qos is reached"
    elif not reason:
        words = "Slurm has not considered it yet"
    text = f"{words} ({reason})" if words and reason else words or f"Slurm says {reason}"
    return f"requeued; {text}" if job.restarts else text


def how_it_ended(job: SlurmJobRow) -> str:
    """Return how a job ended, followed by Slurm's own word for it."""
    words = ENDS.get(job.state, "it ended")
    code = os.waitstatus_to_exitcode(job.status)
    how = f", exit code {code}" if code > 0 else f", signal {-code}" if code < 0 else ""
    where = f" on {job.node}" if job.node else ""
    return f"{words} (Slurm job {job.number}{where}: {job.state}{how})"
