"""When an agent in a Slurm job gives notice."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from shoal.agent.notices import slurm
from shoal.agent.notices.slurm import ASK_AGAIN_S, PATIENCE_S, JobEnd, SlurmJob, judge, parse_end, slurm_job, wake_in
from shoal.agent.notices.source import source
from shoal.errors import BadNoticeSource

NOW = 1000.0


def told(end: JobEnd | None, warned: bool = True):
    return judge(end, 60.0, NOW, "7", NOW if warned else None)


def test_slurms_signal_before_the_time_limit_is_a_notice_until_then():
    notice = told(JobEnd(NOW + 75))
    assert (notice.within_s, notice.source, notice.detail) == (75.0, "slurm", "its time limit (job 7)")


def test_a_preempted_job_has_its_grace_time():
    notice = told(JobEnd(NOW + 10, preempted=True))
    assert (notice.within_s, notice.detail) == (10.0, "another job takes its place (job 7)")


def test_the_time_limit_is_a_notice_also_if_the_signal_does_not_come():
    assert told(JobEnd(NOW + 60), warned=False).within_s == 60.0
    assert told(JobEnd(NOW + 61), warned=False) is None, "it was prolonged"
    assert told(JobEnd(None), warned=False) is None


def test_a_signal_that_slurm_does_not_explain_is_taken_at_its_word():
    assert told(None).within_s == 60.0
    assert told(JobEnd(NOW + 9999)).within_s == 60.0
    assert told(JobEnd(None)).within_s == 60.0


def test_the_signal_and_the_time_limit_are_one_notice():
    assert told(JobEnd(NOW + 60)).key == told(JobEnd(NOW + 60), warned=False).key
    assert told(JobEnd(NOW + 60)).key != told(JobEnd(NOW + 10, preempted=True)).key


def test_an_end_that_is_past_is_now():
    assert told(JobEnd(NOW - 5)).within_s == 0.0


def test_slurm_is_asked_again_only_when_it_matters():
    assert wake_in(JobEnd(NOW + 300), 60.0, NOW, told="") == 240.0
    assert wake_in(JobEnd(NOW + 30), 60.0, NOW, told="") == 0.0
    assert wake_in(JobEnd(None), 60.0, NOW, told="") is None, "there is no limit"
    assert wake_in(JobEnd(NOW + 30), 60.0, NOW, told="said") is None
    assert wake_in(None, 60.0, NOW, told="") == ASK_AGAIN_S


def test_slurm_is_asked_on_while_it_has_not_explained_its_signal():
    for end in (None, JobEnd(None), JobEnd(NOW + 9999)):
        assert wake_in(end, 60.0, NOW + 50, told="said", warned_at=NOW) == PATIENCE_S
    assert wake_in(JobEnd(None), 60.0, NOW + 61, told="said", warned_at=NOW) is None, "its time is up"
    assert wake_in(JobEnd(NOW + 10, preempted=True), 60.0, NOW, told="said", warned_at=NOW) is None


def test_what_a_signal_grants_counts_from_the_signal():
    assert judge(None, 60.0, NOW + 20, "7", NOW).within_s == 40.0
    assert judge(None, 60.0, NOW + 20, "7", NOW).key == told(None).key


def test_a_signal_is_passed_on_although_slurm_is_slow_to_explain_it(monkeypatch):
    monkeypatch.setattr(slurm, "PATIENCE_S", 0.01)
    answer = threading.Event()

    def slow(job: str) -> JobEnd:
        answer.wait(30)
        return JobEnd(time.time() + 10, preempted=True)

    async def heard() -> list[str]:
        found = []
        async for notice in SlurmJob(60.0, "7", JobEnd(None), slow).notices():
            found.append(notice.detail)
            answer.set()
            if len(found) == 2:
                return found

    async def signalled() -> list[str]:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGUSR1)
        return await asyncio.wait_for(heard(), 60)

    assert asyncio.run(signalled()) == ["Slurm has sent its signal (job 7)", "another job takes its place (job 7)"]


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ("1794812521|1794812511|\n", JobEnd(1_794_812_521.0, True)),
        ("1794812521|N/A|\n", JobEnd(1_794_812_521.0)),
        ("NONE|N/A|\n", JobEnd(None)),
        ("", None),
        ("slurm_load_jobs error: Invalid job id specified", None),
    ],
)
def test_what_squeue_says_of_the_end(said, end):
    assert parse_end(said) == end


def test_it_is_a_source_of_jobs_only(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(BadNoticeSource, match="agents that Slurm has started"):
        source("slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert isinstance(source("slurm"), SlurmJob)
    assert isinstance(source("slurm:90"), SlurmJob)
    with pytest.raises(BadNoticeSource, match="not a number"):
        source("slurm:soon")


def test_a_newer_slurm_says_in_the_environment_when_the_job_ends():
    assert slurm_job("", {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1794812521"})._end == JobEnd(1_794_812_521.0)
