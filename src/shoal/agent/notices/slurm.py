"""Notices of an agent that is a Slurm job: its time limit, and a job that may preempt it.

The batch script became the agent, and ``--signal=B:USR1@SECONDS`` makes Slurm warn it: before the time limit, and at
preemption where the site has ``preempt_send_user_signal``. When the job will end is then asked of Slurm, because a
preempted one has its grace time only; the time limit is kept in mind as well, should the signal not come.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from shoal.agent.notices.source import Notice
from shoal.engines.slurm.jobs import timestamp
from shoal.errors import BadNoticeSource

log = logging.getLogger("shoal.agent")

DEFAULT_S = 60.0
# Slurm may send its signal as much as a minute early.
EARLY_S = 60.0
ASK_S = 30.0
ASK_AGAIN_S = 60.0
# A signal is passed on after this time at the latest, whether or not Slurm has said what it means; it is asked on.
PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class JobEnd:
    """When a job will be ended, None if never or not known; `preempted` says that another job takes its place."""

    at: float | None
    preempted: bool = False


class SlurmJob:
    """The job that this process is in. `before_s` is how long before its end notice is given; `end` is as known now."""

    def __init__(self, before_s: float, job: str, end: JobEnd | None, ask: Callable[[str], JobEnd | None]) -> None:
        self._before_s = before_s
        self._job = job
        self._end = end
        self._ask = ask
        self._asking: asyncio.Task[JobEnd | None] | None = None

    async def notices(self) -> AsyncIterator[Notice]:
        signalled = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, signalled.set)
        if self._end is None:
            await self._look()
        told = ""
        warned_at: float | None = None
        while True:
            if await _within(signalled, wake_in(self._end, self._before_s, time.time(), told, warned_at)):
                signalled.clear()
                warned_at = time.time()
            await self._look()
            notice = judge(self._end, self._before_s, time.time(), self._job, warned_at)
            if notice is not None and notice.key != told:
                told = notice.key
                yield notice

    async def _look(self) -> None:
        """Slurm may have changed its mind; while it does not answer, what it said before holds."""
        if self._asking is None:
            self._asking = asyncio.create_task(asyncio.to_thread(self._ask, self._job))
        done, _ = await asyncio.wait({self._asking}, timeout=PATIENCE_S)
        if done:
            self._end, self._asking = self._asking.result() or self._end, None


def slurm_job(rest: str, environ: Mapping[str, str]) -> SlurmJob:
    """The source ``slurm`` or ``slurm:SECONDS``."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        do = "use it in Slurm's jobs only"
        raise BadNoticeSource("the notices of Slurm are for agents that Slurm has started", do=do)
    try:
        before_s = float(rest or DEFAULT_S)
    except ValueError as error:
        raise BadNoticeSource(f"not a number of seconds: slurm:{rest}", do="use slurm:60") from error
    at = timestamp(environ.get("SLURM_JOB_END_TIME", ""))
    return SlurmJob(before_s, job, JobEnd(at) if at is not None else None, ask_slurm)


def wake_in(end: JobEnd | None, before_s: float, now: float, told: str, warned_at: float | None = None) -> float | None:
    """How long to wait for Slurm's signal before Slurm is asked again; None is for ever."""
    if warned_at is not None and now < warned_at + before_s and not explains(end, before_s, now):
        return PATIENCE_S
    if end is None:
        return ASK_AGAIN_S
    if end.at is None or told:
        return None
    return max(0.0, end.at - before_s - now)


def judge(end: JobEnd | None, before_s: float, now: float, job: str, warned_at: float | None) -> Notice | None:
    """What the end that Slurm names and its signal, if it has come, amount to; None if there is time yet."""
    if end is not None and end.at is not None and explains(end, before_s, now):
        left_s = end.at - now
        if warned_at is not None or end.preempted or left_s <= before_s:
            why = "another job takes its place" if end.preempted else "its time limit"
            return _notice(left_s, f"{why} (job {job})", f"{end.preempted} {end.at:.0f}")
    elif warned_at is not None:
        return _notice(warned_at + before_s - now, f"Slurm has sent its signal (job {job})", f"signal {warned_at:.0f}")
    return None


def explains(end: JobEnd | None, before_s: float, now: float) -> bool:
    """Whether this end is so near that Slurm's signal is about it."""
    return end is not None and end.at is not None and end.at - now <= before_s + EARLY_S


def _notice(within_s: float, detail: str, key: str) -> Notice:
    return Notice(max(0.0, within_s), "slurm", detail, key)


async def _within(event: asyncio.Event, wait_s: float | None) -> bool:
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True


def ask_slurm(job: str) -> JobEnd | None:
    """What squeue says of the job; None if it says nothing."""
    argv = ("squeue", "--noheader", f"--jobs={job}", "--Format=EndTime:|,PreemptTime:|")
    env = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            argv, env={**env, "SLURM_TIME_FORMAT": "%s"}, capture_output=True, text=True, timeout=ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("squeue does not say when this job ends: %s", error)
        return None
    return parse_end(done.stdout)


def parse_end(said: str) -> JobEnd | None:
    line = said.strip().partition("\n")[0]
    if line.count("|") < 2:
        return None
    end, preempted, _ = line.split("|", 2)
    return JobEnd(timestamp(end), timestamp(preempted) is not None)
