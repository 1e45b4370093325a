"""What squeue prints, as hires."""

from __future__ import annotations

import pytest

from shoal.engines.slurm.jobs import is_delayed, job_name, parse, seen

NOW = 1_794_812_500.0


def line(state="RUNNING", reason="None", start="N/A", end="N/A", preempted="N/A", restarts=0, status=0, **other):
    number, node, name = other.get("number", 7), other.get("node", "n1"), other.get("name", "shoal-t1-pool-1")
    return f"{number}|{state}|{reason}|{start}|{end}|{preempted}|{restarts}|{status}|{node}|{name}|\n"


def one(text: str, now: float = NOW):
    (found,) = seen(parse(text), "t1", now)
    return found


def test_a_running_job_runs_until_its_time_limit():
    found = one(line(end="1794812809"))
    assert (found.allocation, found.handle, found.state, found.ends_at) == (
        "pool-1",
        "shoal-t1-pool-1",
        "running",
        1_794_812_809.0,
    )
    assert found.why == "Slurm job 7 on n1"


@pytest.mark.parametrize("end", ["N/A", "NONE", "Unknown", ""])
def test_a_job_without_limit_runs_until_nobody_knows_when(end):
    assert one(line(end=end)).ends_at is None


def test_times_are_understood_when_a_site_prints_them_as_dates():
    assert one(line(end="2026-11-16T07:02:01")).ends_at is not None


def test_a_preempted_job_runs_for_its_grace_time_only():
    found = one(line(end="1794812521", preempted="1794812511"))
    assert (found.state, found.ends_at) == ("running", 1_794_812_521.0)
    assert "takes its node back" in found.why


@pytest.mark.parametrize(
    ("state", "reason", "why"),
    [
        ("PENDING", "Resources", "no node is free (Resources)"),
        ("PENDING", "Priority", "other jobs come before it (Priority)"),
        ("PENDING", "None", "Slurm has not looked at it yet"),
        ("PENDING", "PartitionTimeLimit", "for ever: the partition does not allow as long a time limit (P"),
        ("PENDING", "AssocMaxJobsLimit", "a limit of the account or qos is reached (AssocMaxJobsLimit)"),
        ("PENDING", "QOSGrpGRES", "a limit of the account or qos is reached (QOSGrpGRES)"),
        ("PENDING", "QOSMaxCpuPerUserLimit", "a limit of the account or qos is reached (QOSMaxCpuPerUserLimit)"),
        ("PENDING", "ReqNodeNotAvail, UnavailableNodes:n4", "a node that it needs is down, drained or reserved (Req"),
        ("PENDING", "SomethingNew", "Slurm says SomethingNew"),
        ("SUSPENDED", "None", "Slurm has suspended it (SUSPENDED)"),
        ("CONFIGURING", "None", "its node is being made ready (CONFIGURING)"),
        ("REQUEUE_HOLD", "None", "Slurm says REQUEUE_HOLD"),
    ],
)
def test_one_that_waits_says_in_plain_words_for_what(state, reason, why):
    found = one(line(state, reason))
    assert found.state == "waiting"
    assert found.why.startswith(why)
    assert found.ends_at is None


@pytest.mark.parametrize(
    ("state", "status", "why"),
    [
        ("COMPLETED", 0, "it ended by itself (Slurm job 7 on n1: COMPLETED)"),
        ("CANCELLED", 15, "it was cancelled (Slurm job 7 on n1: CANCELLED, signal 15)"),
        ("CANCELLED by 1000", 0, "it was cancelled (Slurm job 7 on n1: CANCELLED)"),
        ("FAILED", 256, "it failed (Slurm job 7 on n1: FAILED, exit code 1)"),
        ("TIMEOUT", 0, "it reached its time limit ("),
        ("NODE_FAIL", 0, "its node was lost ("),
        ("PREEMPTED", 0, "its node was given to a job that may preempt it ("),
        ("OUT_OF_MEMORY", 0, "it used more memory than it was given ("),
        ("SOMETHING_NEW", 0, "it ended (Slurm job 7 on n1: SOMETHING_NEW)"),
    ],
)
def test_one_that_ended_says_how(state, status, why):
    found = one(line(state, status=status, end="1794812400"))
    assert found.state == "gone"
    assert found.why.startswith(why)


def test_one_that_is_being_ended_is_gone():
    assert one(line("COMPLETING", end="1794812500")).state == "gone"
    assert one(line("COMPLETING", end="1794812505"), now=NOW).state == "gone", "clocks differ by some seconds"


def test_one_that_is_being_ended_only_to_be_queued_again_waits():
    assert one(line("COMPLETING", restarts=1)).state == "waiting"
    found = one(line("COMPLETING", start="1794812500", end="1794812800", restarts=1))
    assert (found.state, found.why) == ("waiting", "requeued; it is ended where it was (COMPLETING)")


def test_a_requeued_job_is_the_same_hire_and_need_not_wait_two_minutes():
    text = line("PENDING", "BeginTime", start="1794812620", restarts=1, node="")
    assert one(text).handle == "shoal-t1-pool-1"
    assert one(text).why == "requeued; its time to begin has not come (BeginTime)"
    (job,) = parse(text)
    assert is_delayed(job, NOW)
    assert not is_delayed(job, NOW + 105), "a little is needed, and it is asked once only"


def test_a_job_that_the_user_wants_to_begin_later_is_left_alone():
    (first,) = parse(line("PENDING", "BeginTime", start="1794812620"))
    (later,) = parse(line("PENDING", "BeginTime", start="1794819999", restarts=1))
    assert not is_delayed(first, NOW)
    assert not is_delayed(later, NOW)


def test_a_hire_with_two_jobs_is_one_hire():
    text = line(number=7) + line("PENDING", "Dependency", number=8, node="")
    assert one(text).state == "running"
    text = line("NODE_FAIL", number=7) + line("PENDING", "Resources", number=8, node="")
    assert one(text).state == "waiting"
    text = line("FAILED", number=7) + line("CANCELLED", number=9)
    assert "job 9" in one(text).why, "the last that happened"


def test_jobs_of_others_are_not_ours():
    text = line(name="shoal-t2-pool-1") + line(name="train|it") + line(name="shoal-t1") + line() + "\nnonsense\n"
    assert [found.allocation for found in seen(parse(text), "t1", NOW)] == ["pool-1"]


def test_a_name_that_slurm_would_read_as_several_is_refused():
    with pytest.raises(ValueError, match="cannot be called"):
        job_name("t1", "a,b")
