"""Slurm's jobs as hires: what squeue prints, and what its states and reasons mean; pure."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.engines.engine import AllocationStatus

# The name comes last: it is the only one that can hold a separator, in jobs that are not ours.
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
# Slurm lets two minutes pass before what it queued again may start. Some it needs: what it still has to tell the old
# node must not reach the new start there.
DELAY_S = 150.0
ENOUGH_S = 10
# A job that is requeued is told to begin anew at least its time limit, which is a minute or more, from now.
AHEAD_S = 30.0

WAITING = ("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")

ENDS = {
    "BOOT_FAIL": "its node did not boot",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "it ended by itself",
    "COMPLETING": "it is being ended",
    "DEADLINE": "it could not have ended before its deadline",
    "FAILED": "it failed",
    "NODE_FAIL": "its node was lost",
    "OUT_OF_MEMORY": "it used more memory than it was given",
    "PREEMPTED": "its node was given to a job that may preempt it",
    "TIMEOUT": "it reached its time limit",
}

WAITS = {
    "BeginTime": "its time to begin has not come",
    "Dependency": "another job of this name has not ended",
    "JobHeldAdmin": "an administrator holds it back",
    "JobHeldUser": "it is held back: scontrol release lets it go",
    "Licenses": "licenses are in use",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        "the nodes that it could run on are down, drained or reserved"
    ),
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs",
    "PartitionNodeLimit": "for ever: the partition does not allow as many nodes",
    "PartitionTimeLimit": "for ever: the partition does not allow as long a time limit",
    "Priority": "other jobs come before it",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "Resources": "no node is free",
    "AccountNotAllowed": "for ever: the partition does not allow the account",
    "BadConstraints": "for ever: no node has what constraint asks for",
    "InvalidAccount": "for ever: the account is not valid",
    "InvalidQOS": "for ever: the qos is not valid",
    "QOSNotAllowed": "for ever: the partition does not allow the qos",
}
LIMIT = re.compile(r"(Assoc|QOS)\w*(Max|Grp|Min|Usage)\w*")


@dataclass(frozen=True, slots=True)
class SlurmJobRow:
    """A line of squeue. `status` is what wait() gave; `start` of one that waits is when it may start."""

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


def job_name(tag: str, hire: str) -> str:
    """What a hire's job is called, by which it is found again, and cancelled."""
    name = f"shoal-{tag}-{hire}"
    if not re.fullmatch(r"[\w.:-]+", name):
        raise ValueError(f"a job cannot be called {name!r}")
    return name


def parse(text: str) -> list[SlurmJobRow]:
    """What squeue printed in our format."""
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
    """How long Slurm waits between SIGTERM and SIGKILL, as `scontrol show config` prints it."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    return float(found[1]) if found else None


def timestamp(text: str) -> float | None:
    """A point in time as seconds, with SLURM_TIME_FORMAT=%s or without; None for N/A, NONE, Unknown."""
    text = text.strip()
    if text.isdecimal():
        return float(text)
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def seen(jobs: Iterable[SlurmJobRow], tag: str, now: float) -> list[AllocationStatus]:
    """The hires with this tag, each once, however many jobs it has.

    There are two when Slurm took a submission of which it did not say so: the second waits for the end of the first.
    """
    prefix = job_name(tag, "")
    found: dict[str, tuple[tuple[int, int], AllocationStatus]] = {}
    for job in jobs:
        if not job.name.startswith(prefix):
            continue
        one = _seen(job, job.name.removeprefix(prefix), now)
        rank = (("running", "waiting", "gone").index(one.state), -int(job.number) if job.number.isdecimal() else 0)
        if one.allocation not in found or rank < found[one.allocation][0]:
            found[one.allocation] = (rank, one)
    return [one for _, one in sorted(found.values(), key=lambda pair: pair[1].allocation)]


def _seen(job: SlurmJobRow, hire: str, now: float) -> AllocationStatus:
    if job.state in RUNNING:
        why = "Slurm takes its node back for another job" if job.preempted else ""
        return AllocationStatus(
            hire, job.name, "running", why or f"Slurm job {job.number} on {job.node}", ends_at=job.end
        )
    if job.state in WAITING or comes_back(job, now):
        return AllocationStatus(hire, job.name, "waiting", waits_for(job))
    return AllocationStatus(hire, job.name, "gone", how_it_ended(job))


def comes_back(job: SlurmJobRow, now: float) -> bool:
    """Whether a job that is being ended is so only to be queued again: then its end is not known, or far ahead."""
    return job.state == "COMPLETING" and (job.end is None or job.end > now + AHEAD_S)


def is_delayed(job: SlurmJobRow, now: float) -> bool:
    """Whether it waits only because Slurm queued it again, and longer than it has to."""
    delayed = job.state == "PENDING" and job.reason == BEGIN and job.restarts > 0
    return delayed and job.start is not None and 2 * ENOUGH_S < job.start - now < DELAY_S


def waits_for(job: SlurmJobRow) -> str:
    """In plain words, with Slurm's own after them."""
    reason = job.reason or {"PENDING": ""}.get(job.state, job.state)
    key = reason.partition(",")[0]
    words = WAITS.get(key, "")
    if job.state == "SUSPENDED":
        words, reason = "Slurm has suspended it", job.state
    elif job.state == "CONFIGURING":
        words, reason = "its node is being made ready", job.state
    elif comes_back(job, float("-inf")):
        words, reason = "it is ended where it was", job.state
    elif not words and LIMIT.fullmatch(key):
        words = "a limit of the account or qos is reached"
    elif not reason:
        words = "Slurm has not looked at it yet"
    text = f"{words} ({reason})" if words and reason else words or f"Slurm says {reason}"
    return f"requeued; {text}" if job.restarts else text


def how_it_ended(job: SlurmJobRow) -> str:
    """In plain words, with Slurm's own after them."""
    words = ENDS.get(job.state, "it ended")
    code = os.waitstatus_to_exitcode(job.status)
    how = f", exit code {code}" if code > 0 else f", signal {-code}" if code < 0 else ""
    where = f" on {job.node}" if job.node else ""
    return f"{words} (Slurm job {job.number}{where}: {job.state}{how})"
