"""Output of squeue as allocations."""

from __future__ import annotations

import pytest

from shoal.engines.slurm.jobs import is_delayed, job_name, kill_wait_s, parse, statuses

NOW = 1_794_812_500.0


def line(state="RUNNING", reason="None", start="N/A", end="N/A", preempted="N/A", restarts=0, status=0, **other):
    number, node, name = other.get("number", 7), other.get("node", "n1"), other.get("name", "shoal-t1-pool-1")
    return f"{number}|{state}|{reason}|{start}|{end}|{preempted}|{restarts}|{status}|{node}|{name}|\n"


def status_of(text: str, now: float = NOW):
    (status,) = statuses(parse(text), "t1", now)
    return status


def test_running_job_ends_at_its_time_limit():
    status = status_of(line(end="1794812809"))
    assert (status.allocation, status.handle, status.state, status.ends_at) == (
        "pool-1",
        "shoal-t1-pool-1",
        "running",
        1_794_812_809.0,
    )
    assert status.why == "Slurm job 7 on n1"


@pytest.mark.parametrize("end", ["N/A", "NONE", "Unknown", ""])
def test_job_without_limit_has_no_known_end(end):
    assert status_of(line(end=end)).ends_at is None


def test_times_are_parsed_when_a_site_prints_dates():
    assert status_of(line(end="2026-11-16T07:02:01")).ends_at is not None


def test_preempted_job_ends_after_its_grace_time():
    status = status_of(line(end="1794812521", preempted="1794812511"))
    assert (status.state, status.ends_at) == ("running", 1_794_812_521.0)
    assert "preempts it" in status.why


@pytest.mark.parametrize(
    ("state", "reason", "why"),
    [
        ("PENDING", "Resources", "no node is free (Resources)"),
        ("PENDING", "Priority", "other jobs have priority (Priority)"),
        ("PENDING", "None", "Slurm has not considered it yet"),
        ("PENDING", "PartitionTimeLimit", "forever: the partition does not allow a time limit that long (P"),
        ("PENDING", "AssocMaxJobsLimit", "a limit of the account or qos is reached (AssocMaxJobsLimit)"),
        ("PENDING", "QOSGrpGRES", "a limit of the account or qos is reached (QOSGrpGRES)"),
        ("PENDING", "QOSMaxCpuPerUserLimit", "a limit of the account or qos is reached (QOSMaxCpuPerUserLimit)"),
        ("PENDING", "ReqNodeNotAvail, UnavailableNodes:n4", "a node that it needs is down, drained or reserved (Req"),
        ("PENDING", "SomethingNew", "Slurm says SomethingNew"),
        ("SUSPENDED", "None", "Slurm has suspended it (SUSPENDED)"),
        ("CONFIGURING", "None", "its node is being prepared (CONFIGURING)"),
        ("REQUEUE_HOLD", "None", "Slurm says REQUEUE_HOLD"),
    ],
)
def test_waiting_job_says_what_it_waits_for(state, reason, why):
    status = status_of(line(state, reason))
    assert status.state == "waiting"
    assert status.why.startswith(why)
    assert status.ends_at is None


@pytest.mark.parametrize(
    ("state", "status", "why"),
    [
        ("COMPLETED", 0, "it ended on its own (Slurm job 7 on n1: COMPLETED)"),
        ("CANCELLED", 15, "it was cancelled (Slurm job 7 on n1: CANCELLED, signal 15)"),
        ("CANCELLED by 1000", 0, "it was cancelled (Slurm job 7 on n1: CANCELLED)"),
        ("FAILED", 256, "it failed (Slurm job 7 on n1: FAILED, exit code 1)"),
        ("TIMEOUT", 0, "it reached its time limit ("),
        ("NODE_FAIL", 0, "its node failed ("),
        ("PREEMPTED", 0, "it was preempted by another job ("),
        ("OUT_OF_MEMORY", 0, "it exceeded its memory limit ("),
        ("SOMETHING_NEW", 0, "it ended (Slurm job 7 on n1: SOMETHING_NEW)"),
    ],
)
def test_ended_job_says_how(state, status, why):
    status = status_of(line(state, status=status, end="1794812400"))
    assert status.state == "gone"
    assert status.why.startswith(why)


def test_completing_job_is_gone():
    assert status_of(line("COMPLETING", end="1794812500")).state == "gone"
    assert status_of(line("COMPLETING", end="1794812505"), now=NOW).state == "gone", "clocks differ by some seconds"


def test_completing_job_that_is_requeued_waits():
    assert status_of(line("COMPLETING", restarts=1)).state == "waiting"
    status = status_of(line("COMPLETING", start="1794812500", end="1794812800", restarts=1))
    assert (status.state, status.why) == ("waiting", "requeued; it is ending on its old node (COMPLETING)")


def test_requeued_job_is_the_same_allocation_and_its_delay_can_be_shortened():
    text = line("PENDING", "BeginTime", start="1794812620", restarts=1, node="")
    assert status_of(text).handle == "shoal-t1-pool-1"
    assert status_of(text).why == "requeued; its start time has not come (BeginTime)"
    (job,) = parse(text)
    assert is_delayed(job, NOW)
    assert not is_delayed(job, NOW + 105), "some delay is needed, and it is shortened once only"


def test_start_time_that_the_user_chose_is_not_shortened():
    (first,) = parse(line("PENDING", "BeginTime", start="1794812620"))
    (later,) = parse(line("PENDING", "BeginTime", start="1794819999", restarts=1))
    assert not is_delayed(first, NOW)
    assert not is_delayed(later, NOW)


def test_two_jobs_of_one_name_are_one_allocation():
    text = line(number=7) + line("PENDING", "Dependency", number=8, node="")
    assert status_of(text).state == "running"
    text = line("NODE_FAIL", number=7) + line("PENDING", "Resources", number=8, node="")
    assert status_of(text).state == "waiting"
    text = line("FAILED", number=7) + line("CANCELLED", number=9)
    assert "job 9" in status_of(text).why, "the latest job decides"


def test_jobs_of_other_tags_are_ignored():
    text = line(name="shoal-t2-pool-1") + line(name="train|it") + line(name="shoal-t1") + line() + "\nnonsense\n"
    assert [status.allocation for status in statuses(parse(text), "t1", NOW)] == ["pool-1"]


def test_name_that_slurm_would_read_as_several_is_refused():
    with pytest.raises(ValueError, match="invalid job name"):
        job_name("t1", "a,b")


def test_kill_wait_is_read_from_slurms_configuration() -> None:
    assert kill_wait_s("JobRequeue              = 1\nKillWait                = 45 sec\nLaunch = x\n") == 45.0
    assert kill_wait_s("slurm_load_ctl_conf error: Unable to contact slurm controller") is None
