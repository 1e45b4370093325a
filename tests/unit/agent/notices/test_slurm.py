"""Notices of an agent in a Slurm job."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from shoal.agent.notices import slurm
from shoal.agent.notices.slurm import (
    EXPLAIN_S,
    QUERY_AGAIN_S,
    JobEnd,
    SlurmJob,
    notice_for,
    parse_end,
    slurm_job,
    wait_s,
)
from shoal.agent.notices.source import open_source
from shoal.errors import BadNoticeSource

NOW = 1000.0


def notice_at_now(end: JobEnd | None, warned: bool = True):
    return notice_for(end, 60.0, NOW, "7", NOW if warned else None)


def test_signal_before_the_time_limit_is_a_notice_until_then():
    notice = notice_at_now(JobEnd(NOW + 75))
    assert (notice.within_s, notice.source, notice.detail) == (75.0, "slurm", "time limit (job 7)")


def test_notice_of_preemption_lasts_for_the_grace_time():
    notice = notice_at_now(JobEnd(NOW + 10, preempted=True))
    assert (notice.within_s, notice.detail) == (10.0, "preempted by another job (job 7)")


def test_time_limit_is_a_notice_without_a_signal():
    assert notice_at_now(JobEnd(NOW + 60), warned=False).within_s == 60.0
    assert notice_at_now(JobEnd(NOW + 61), warned=False) is None, "the limit was extended"
    assert notice_at_now(JobEnd(None), warned=False) is None


def test_unexplained_signal_grants_the_requested_time():
    assert notice_at_now(None).within_s == 60.0
    assert notice_at_now(JobEnd(NOW + 9999)).within_s == 60.0
    assert notice_at_now(JobEnd(None)).within_s == 60.0


def test_signal_and_time_limit_are_one_notice():
    assert notice_at_now(JobEnd(NOW + 60)).key == notice_at_now(JobEnd(NOW + 60), warned=False).key
    assert notice_at_now(JobEnd(NOW + 60)).key != notice_at_now(JobEnd(NOW + 10, preempted=True)).key


def test_end_in_the_past_is_now():
    assert notice_at_now(JobEnd(NOW - 5)).within_s == 0.0


def test_slurm_is_asked_again_before_the_time_limit_only():
    assert wait_s(JobEnd(NOW + 300), 60.0, NOW, last_key="") == 240.0
    assert wait_s(JobEnd(NOW + 30), 60.0, NOW, last_key="") == 0.0
    assert wait_s(JobEnd(None), 60.0, NOW, last_key="") is None, "there is no limit"
    assert wait_s(JobEnd(NOW + 30), 60.0, NOW, last_key="reported") is None
    assert wait_s(None, 60.0, NOW, last_key="") == QUERY_AGAIN_S


def test_slurm_is_asked_again_while_its_signal_is_unexplained():
    for end in (None, JobEnd(None), JobEnd(NOW + 9999)):
        assert wait_s(end, 60.0, NOW + 50, last_key="reported", warned_at=NOW) == EXPLAIN_S
    assert wait_s(JobEnd(None), 60.0, NOW + 61, last_key="reported", warned_at=NOW) is None, "its time is up"
    assert wait_s(JobEnd(NOW + 10, preempted=True), 60.0, NOW, last_key="reported", warned_at=NOW) is None


def test_granted_time_counts_from_the_signal():
    assert notice_for(None, 60.0, NOW + 20, "7", NOW).within_s == 40.0
    assert notice_for(None, 60.0, NOW + 20, "7", NOW).key == notice_at_now(None).key


def test_signal_is_passed_on_even_if_slurm_is_slow_to_explain_it(monkeypatch):
    monkeypatch.setattr(slurm, "EXPLAIN_S", 0.01)
    reply = threading.Event()

    def slow(job: str) -> JobEnd:
        reply.wait(30)
        return JobEnd(time.time() + 10, preempted=True)

    async def first_two() -> list[str]:
        details = []
        async for notice in SlurmJob(60.0, "7", JobEnd(None), slow).notices():
            details.append(notice.detail)
            reply.set()
            if len(details) == 2:
                return details

    async def signalled() -> list[str]:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGUSR1)
        return await asyncio.wait_for(first_two(), 60)

    assert asyncio.run(signalled()) == ["Slurm sent its signal (job 7)", "preempted by another job (job 7)"]


@pytest.mark.parametrize(
    ("output", "end"),
    [
        ("1794812521|1794812511|\n", JobEnd(1_794_812_521.0, True)),
        ("1794812521|N/A|\n", JobEnd(1_794_812_521.0)),
        ("NONE|N/A|\n", JobEnd(None)),
        ("", None),
        ("slurm_load_jobs error: Invalid job id specified", None),
    ],
)
def test_end_is_parsed_from_squeue(output, end):
    assert parse_end(output) == end


def test_source_works_only_in_a_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(BadNoticeSource, match="works only in a Slurm job"):
        open_source("slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert isinstance(open_source("slurm"), SlurmJob)
    assert isinstance(open_source("slurm:90"), SlurmJob)
    with pytest.raises(BadNoticeSource, match="not a number"):
        open_source("slurm:soon")


def test_end_is_taken_from_the_environment_where_slurm_sets_it():
    assert slurm_job("", {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1794812521"})._end == JobEnd(1_794_812_521.0)
