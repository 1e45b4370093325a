"""Runs with parameter servers: no trainer exceeds the bound, and no death costs a sample."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.process.faults.checked_run import checked_run
from tests.process.servers.served_run import served_run

pytestmark = [pytest.mark.process, pytest.mark.servers, pytest.mark.timeout(600)]

CALM = ("lease_s=2", "restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2")


def test_fast_trainer_waits_for_a_slow_one_at_the_bound(tmp_path: Path) -> None:
    slow = {"local/1": 0.08}
    with served_run(tmp_path, "2:2", "stale:2", "ticket_sizing=equal", slow=slow, epochs=3) as run:
        run.finish()
        run.check_counts()
        assert run.check_bound(2) == 2, "the bound was never reached, so nothing was tested"


def test_no_trainer_waits_without_a_bound(tmp_path: Path) -> None:
    slow = {"local/1": 0.15}
    with served_run(tmp_path, "2:2", "async", "ticket_sizing=equal", slow=slow, epochs=6) as run:
        run.finish()
        run.check_counts()
        assert max(e["clock"] - e["low"] for e in run.events() if e["event"] == "begin") > 8


def test_killed_trainer_costs_no_sample_and_is_not_waited_for(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:3", "stale:1", *CALM, pause_s=0.03, epochs=12) as run:
        run.until(lambda: "local/1" in run.pids(), "the trainer that is to die")
        run.until_step(10)
        run.kill("local/1")
        run.until_step(40)
        run.finish()
        run.check_counts()
        run.check_bound(1)


def test_killed_server_costs_nothing(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:2", "stale:2", *CALM, pause_s=0.03, epochs=12) as run:
        run.until(run.replicated, "every part to have a backup")
        run.kill(run.servers()[0])
        step = run.step()
        run.until_step(step + 15)
        run.finish()
        run.check_counts()
        run.check_bound(2)
        assert not [e for e in run.journal() if e["kind"] == "MemberReady" and e["fields"]["restored"]]


def test_trainer_in_a_long_computation_is_kept_when_the_ledger_moves(tmp_path: Path) -> None:
    slow = {"local/1": 4.0}
    with served_run(tmp_path, "2:2", "stale:1", *CALM, "ticket_sizing=equal", slow=slow, epochs=1) as run:
        run.until(run.replicated, "every part to have a backup")
        lead = run.placements()[-1].partition("the ledger on ")[2].partition(",")[0]
        run.until(lambda: run.commits() and run.commits()[-1]["at"] < time.monotonic() - 0.5, "all to wait")
        run.kill(lead)
        run.finish(timeout_s=180)
        run.check_counts()
        run.check_bound(1)


def test_each_server_can_be_killed_one_after_the_other(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:2", "stale:2", *CALM, pause_s=0.03, epochs=40) as run:
        for _ in range(2):
            for number in range(2):
                run.until(run.replicated, "every part to have a backup")
                before = run.pids()[f"local/server-{number}"]
                run.kill(f"local/server-{number}")
                name = f"local/server-{number}"
                run.until(lambda n=name, b=before: run.pids().get(n, b) != b, "the server to be back")
        run.until(run.replicated, "every part to have a backup")
        run.until(run.spread, "each server to lead one shard again")
        assert run.shoal("status")["uncopied"] == ""
        run.finish(timeout_s=180)
        run.check_counts()
        run.check_bound(2)


def test_training_continues_while_the_coordinator_is_down(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:2", "stale:2", *CALM, pause_s=0.03, epochs=30) as run:
        run.until(run.replicated, "every part to have a backup")
        run.service_process("coordinator").kill()
        step = run.step()
        run.until_step(step + 20)
        run.finish()
        run.check_counts()
        run.check_bound(2)


def test_server_under_notice_hands_off_its_parts(tmp_path: Path) -> None:
    # It must not wait for its deadline, which is far beyond the timeout of this test.
    settings = (*CALM, "notice.grace_s=1000")
    with served_run(tmp_path, "2:2", "stale:2", *settings, pause_s=0.03, epochs=20) as run:
        run.until(run.replicated, "every part to have a backup")
        before = run.pids()["local/server-0"]
        run.kill("local/server-0", signal.SIGTERM)
        run.until(lambda: run.pids().get("local/server-0", before) != before, "another server")
        run.finish()
        run.check_counts()
        run.check_bound(2)


def test_hung_server_is_replaced_and_rejoins(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:2", "stale:2", *CALM, pause_s=0.03, epochs=60) as run:
        run.until(run.replicated, "every part to have a backup")
        pid = run.pids()["local/server-0"]
        run.kill("local/server-0", signal.SIGSTOP)
        step = run.step()
        run.until_step(step + 20)
        run.kill("local/server-0", signal.SIGCONT)
        before = len(run.placements())
        run.until(lambda: len(run.placements()) > before and run.replicated(), "the server to have its copies again")
        assert run.pids()["local/server-0"] == pid, "the process that woke up was replaced"
        run.finish(timeout_s=180)
        run.check_counts()
        run.check_bound(2)


def test_trainer_with_a_hung_script_is_not_waited_for(tmp_path: Path) -> None:
    hangs = {"local/1": 10}
    with served_run(tmp_path, "2:2", "stale:2", *CALM, "hang_timeout_s=2", pause_s=0.03, epochs=60, hangs=hangs) as run:
        run.until_step(5)
        run.until(lambda: run.journal("MemberLost"), "the hang to be detected")
        (lost,) = run.journal("MemberLost")
        assert lost["fields"]["member"] == "local/1"
        assert "while other trainers wait for it" in lost["fields"]["reason"]
        run.finish(timeout_s=180)
        run.check_counts()
        run.check_bound(2)


def test_state_is_checkpointed_when_all_members_are_under_notice(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:2", "async", *CALM, pause_s=0.03, epochs=60) as run:
        run.until(run.replicated, "every part to have a backup")
        for name in (*run.trainers(), *run.servers()):
            run.kill(name, signal.SIGTERM)
        run.finish(exit_code=75)
        assert "wrote the checkpoint" in run.output


def test_trainer_under_notice_finishes_its_ticket(tmp_path: Path) -> None:
    with served_run(tmp_path, "1:2", "stale:2", *CALM, pause_s=0.03, epochs=12) as run:
        run.until(lambda: "local/1" in run.pids(), "the trainer that is to leave")
        run.until_step(10)
        run.kill("local/1", signal.SIGTERM)
        run.finish()
        run.check_counts()
        run.check_bound(2)


def test_lone_server_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    with served_run(
        tmp_path, "2:2", "stale:2", *CALM, "checkpoint.every_steps=5", servers=1, pause_s=0.03, epochs=12
    ) as run:
        run.until(lambda: "wrote the checkpoint" in run.output, "a checkpoint")
        run.kill("local/server-0")
        run.finish()
        run.check_counts()
        assert [e for e in run.journal() if e["kind"] == "MemberReady" and e["fields"]["restored"]]


def test_lone_server_under_notice_serves_until_its_deadline_and_checkpoints(tmp_path: Path) -> None:
    settings = (*CALM, "notice.grace_s=8")
    with served_run(tmp_path, "2:2", "stale:2", *settings, servers=1, pause_s=0.03, epochs=12) as run:
        run.until_step(10)
        before = run.pids()["local/server-0"]
        run.kill("local/server-0", signal.SIGTERM)
        run.until(lambda: run.pids().get("local/server-0", before) != before, "another server")
        run.finish()
        run.check_counts()
        left = max(int(step) for step in re.findall(r"wrote the checkpoint of step (\d+)", run.output))
        assert f"restored the checkpoint of step {left}" in run.output


def test_training_starts_over_if_both_servers_are_lost_before_a_checkpoint(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:2", "stale:2", *CALM, pause_s=0.03, epochs=6) as run:
        run.until_step(10)
        for name in run.servers():
            run.kill(name)
        run.finish()
        run.check_counts()
        assert "no checkpoint exists: training starts over" in run.output


def test_workers_and_micro_batches_change_nothing(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:2", "stale:1", workers=2, micro=8, epochs=3) as run:
        run.finish()
        run.check_counts()
        run.check_bound(1)


def test_stopped_run_resumes_where_it_was(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:2", "stale:2", *CALM, pause_s=0.03, epochs=8) as run:
        run.until_step(20)
        run.shoal("stop", run.shoal("ps")[0]["run"])
        run.finish(exit_code=75)
        reached = run.step()
        run.process = run.start("resume", run.shoal("ps", "--all")[0]["run"])
        run.finish()
        run.check_counts()
        again = [e for e in run.events() if e["event"] == "begin" and e["ticket"][0] < reached - 4]
        starts = sorted({e["pid"] for e in run.events() if e["event"] == "ready"})
        assert len(starts) == 8
        assert not [e for e in again if e["at"] > max(c["at"] for c in run.commits() if c["step"] <= reached)]


def test_server_that_dies_while_the_run_stops_costs_nothing(tmp_path: Path) -> None:
    slow = {"local/1": 3.0}
    with served_run(tmp_path, "2:2", "async", *CALM, "ticket_sizing=equal", slow=slow, pause_s=0.03, epochs=60) as run:
        run.until(run.replicated, "every part to have a backup")
        step = run.step()
        run.until_step(step + 5)
        lead = run.placements()[-1].partition("the ledger on ")[2].partition(",")[0]
        run.shoal("stop", run.shoal("ps")[0]["run"], "--wait", "0")
        run.kill(lead)
        run.finish(exit_code=75)
        written = [int(step) for step in re.findall(r"wrote the checkpoint of step (\d+)", run.output)]
        assert max(written, default=0) > step


def test_trainers_of_a_stopping_run_do_not_wait_for_a_lost_state(tmp_path: Path) -> None:
    slow = {"local/1": 3.0}
    with served_run(tmp_path, "2:2", "async", *CALM, "ticket_sizing=equal", servers=1, slow=slow, epochs=60) as run:
        run.until_step(5)
        run.shoal("stop", run.shoal("ps")[0]["run"], "--wait", "0")
        run.kill("local/server-0")
        run.finish(exit_code=75)
        assert not [e for e in run.journal() if e["kind"] == "FleetTimerExpired" and e["fields"]["what"] == "grace"]


def test_trainer_that_leaves_its_loop_does_not_end_training_for_the_others(tmp_path: Path) -> None:
    leaves = {"local/0": 10}
    with served_run(tmp_path, "2:2", "async", *CALM, leaves=leaves, pause_s=0.03, epochs=12) as run:
        (run.records / "stay").touch()
        run.until(lambda: [e for e in run.events() if e["event"] == "left"], "a trainer to leave its loop")
        before = run.pids()["local/1"]
        run.kill("local/1")
        run.until(lambda: run.pids().get("local/1", before) != before, "the other to be back")
        (run.records / "stay").unlink()
        run.finish()
        run.check_counts()


@pytest.mark.parametrize("servers", [1, 3])
def test_single_trainer_with_servers_trains_as_without_them(tmp_path: Path, servers: int) -> None:
    """Check that Adam and its schedule, applied shard by shard on servers, give the result of one process."""
    with checked_run(tmp_path, "1:1", ("sync=stale:0", f"servers={servers}"), epochs=9) as run:
        run.finish()
        run.check_parameters(torch.load(run.records / "final.pt", weights_only=True))
