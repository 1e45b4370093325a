"""Notices of Slurm, for an agent that is a Slurm job: its time limit, and preemption by another job.

`sbatch --signal=B:USR1@SECONDS` makes Slurm signal the batch script, which has become the agent: before the time limit,
and at preemption where the site sets `preempt_send_user_signal`. The signal does not say which, and a preempted job has
only its grace time left. So squeue is asked for the end of the job. Three rules make that robust:

- A signal is passed on after two seconds at the latest, with the time that was asked for in `--signal`, even if Slurm
  does not answer. Once it does, the exact end follows as a second notice.
- The time limit is watched too, in case the signal does not come.
- Slurm may change the end of a job, so it is asked again before the limit counts.
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
# Slurm may send its signal up to a minute early.
SIGNAL_EARLY_S = 60.0
QUERY_TIMEOUT_S = 30.0
QUERY_AGAIN_S = 60.0
# How long Slurm has to explain a signal before it is passed on; it is asked again afterwards.
EXPLAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class JobEnd:
    """End of a job in seconds since the epoch, None if there is none; `preempted` if another job takes its place."""

    at: float | None
    preempted: bool = False


class SlurmJob:
    """The job that this process runs in. Notice is given `before_s` before its end, which `query` returns."""

    def __init__(self, before_s: float, job: str, end: JobEnd | None, query: Callable[[str], JobEnd | None]) -> None:
        self._before_s = before_s
        self._job = job
        self._end = end
        self._query = query
        self._query_task: asyncio.Task[JobEnd | None] | None = None

    async def notices(self) -> AsyncIterator[Notice]:
        signalled = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, signalled.set)
        if self._end is None:
            await self._update_end()
        last_key = ""
        warned_at: float | None = None
        while True:
            if await _within(signalled, wait_s(self._end, self._before_s, time.time(), last_key, warned_at)):
                signalled.clear()
                warned_at = time.time()
            await self._update_end()
            notice = notice_for(self._end, self._before_s, time.time(), self._job, warned_at)
            if notice is not None and notice.key != last_key:
                last_key = notice.key
                yield notice

    async def _update_end(self) -> None:
        """Ask Slurm for the end of the job; keep the last one while it does not answer."""
        if self._query_task is None:
            self._query_task = asyncio.create_task(asyncio.to_thread(self._query, self._job))
        done, _ = await asyncio.wait({self._query_task}, timeout=EXPLAIN_S)
        if done:
            self._end, self._query_task = self._query_task.result() or self._end, None


def slurm_job(rest: str, environ: Mapping[str, str]) -> SlurmJob:
    """Return the source `slurm` or `slurm:SECONDS`; raise `BadNoticeSource` outside of a job."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        raise BadNoticeSource("the notice source slurm works only in a Slurm job", do="use another notice source")
    at = timestamp(environ.get("SLURM_JOB_END_TIME", ""))
    return SlurmJob(float(rest or DEFAULT_S), job, JobEnd(at) if at is not None else None, query_end)


def wait_s(
    end: JobEnd | None, before_s: float, now: float, last_key: str, warned_at: float | None = None
) -> float | None:
    """Return how long to wait for a signal before Slurm is asked again; None for no limit."""
    if warned_at is not None and now < warned_at + before_s and not is_near(end, before_s, now):
        return EXPLAIN_S
    if end is None:
        return QUERY_AGAIN_S
    if end.at is None or last_key:
        return None
    return max(0.0, end.at - before_s - now)


def notice_for(end: JobEnd | None, before_s: float, now: float, job: str, warned_at: float | None) -> Notice | None:
    """Return the notice that the job's end and the signal, if it came, call for; None if there is time yet."""
    if end is not None and end.at is not None and is_near(end, before_s, now):
        remaining_s = end.at - now
        if warned_at is not None or end.preempted or remaining_s <= before_s:
            why = "preempted by another job" if end.preempted else "time limit"
            return _notice(remaining_s, f"{why} (job {job})", f"{end.preempted} {end.at:.0f}")
    elif warned_at is not None:
        return _notice(warned_at + before_s - now, f"Slurm sent its signal (job {job})", f"signal {warned_at:.0f}")
    return None


def is_near(end: JobEnd | None, before_s: float, now: float) -> bool:
    """Return whether this end is so near that Slurm's signal is about it."""
    return end is not None and end.at is not None and end.at - now <= before_s + SIGNAL_EARLY_S


def _notice(within_s: float, detail: str, key: str) -> Notice:
    return Notice(max(0.0, within_s), "slurm", detail, key)


async def _within(event: asyncio.Event, wait_s: float | None) -> bool:
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True


def query_end(job: str) -> JobEnd | None:
    """Return the end of the job from squeue; None if it does not answer."""
    argv = ("squeue", "--noheader", f"--jobs={job}", "--Format=EndTime:|,PreemptTime:|")
    env = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            argv,
            env={**env, "SLURM_TIME_FORMAT": "%s"},
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("cannot get the end of this job from squeue: %s", error)
        return None
    return parse_end(done.stdout)


def parse_end(output: str) -> JobEnd | None:
    """Return the end that squeue printed; None for anything else."""
    line = output.strip().partition("\n")[0]
    if line.count("|") < 2:
        return None
    end, preempted, _ = line.split("|", 2)
    return JobEnd(timestamp(end), timestamp(preempted) is not None)
