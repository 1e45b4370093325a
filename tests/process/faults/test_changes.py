"""Planned joins and departures of members, and losses of the coordinator and of agents."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from tests.process.faults.checked_run import checked_run

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]


def test_notice_costs_no_step_and_no_timeout(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", pause_s=0.03, epochs=8) as run:
        run.until_size(3)
        noticed = psutil.Process(run.pids()["local/1"])
        run.kill("local/1", signal.SIGTERM)
        noticed.wait(60)
        run.finish()
        run.check()
        broken = [e for e in run.journal() if e["kind"] == "WorldBroken"]
        assert not broken, "a notice broke a world"
        left = [e for e in run.journal() if e["kind"] == "MemberLeft" and e["fields"]["member"] == "local/1"]
        assert left, "local/1 did not report that it left"


def test_more_members_join_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    with checked_run(tmp_path, "1:1", pause_s=0.03, epochs=10) as run:
        run.until_step(5)
        before = run.pids()
        name = run.shoal("ps")[0]["run"]
        run.shoal("scale", name, "1:3")
        run.until_size(3)
        assert run.pids()["local/0"] == before["local/0"]
        run.shoal("scale", name, "1:2")
        run.until_size(2)
        run.finish()
        run.check()
        assert not [e for e in run.journal() if e["kind"] == "WorldBroken"], "a planned change broke a world"


def test_simultaneous_join_and_loss_cost_no_sample(tmp_path: Path) -> None:
    with checked_run(tmp_path, "1:2", pause_s=0.03, epochs=20) as run:
        run.until_size(2)
        name = run.shoal("ps")[0]["run"]
        run.shoal("scale", name, "1:4")
        run.until(lambda: len(run.pids()) >= 3, "a third member to be ready")
        run.kill("local/0")
        run.until_size(4)
        run.finish()
        run.check()


def test_training_continues_without_the_coordinator_which_recovers_from_its_journal(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", pause_s=0.03, epochs=12) as run:
        run.until_size(3)
        run.service_process("coordinator").kill()
        at = run.step()
        run.until(lambda: run.step() > at + 10, "ten steps without it")
        before = run.pids()["local/2"]
        run.kill("local/2")
        again = lambda: any(c["member"] == "local/2" and c["pid"] != before for c in run.commits())  # noqa: E731
        run.until(again, "the lost member to train again")
        run.finish()
        run.check()
        assert [e["kind"] for e in run.journal()].count("RunCreated") == 1


def test_stop_waits_for_a_coordinator_that_is_restarting(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:2", pause_s=0.03, epochs=1000) as run:
        run.until_step(5)
        name = run.name
        run.service_process("coordinator").kill()
        run.shoal("stop", name)
        run.finish(exit_code=75)
        assert len(run.journal("UserStopRequested")) == 1


def test_coordinator_stopped_for_longer_than_a_lease_loses_no_member(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", ("lease_s=2",), pause_s=0.03, epochs=12) as run:
        run.until_size(3)
        coordinator = run.service_process("coordinator")
        coordinator.suspend()
        at = run.step()
        time.sleep(7.0)
        run.until_step(at + 10)
        hellos = len(run.journal("MemberConnected"))
        coordinator.resume()
        run.until(lambda: len(run.journal("MemberConnected")) >= hellos + 3, "all to find the coordinator again")
        run.until_step(run.step() + 10)
        assert not run.journal("MemberLost")
        assert len({c["world"] for c in run.commits() if c["size"] == 3}) == 1, "the world was formed again"
        run.finish()
        run.check()


def test_member_lost_while_the_coordinator_is_down_is_replaced_afterwards(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", pause_s=0.03, epochs=12) as run:
        run.until_size(3)
        coordinator = run.service_process("coordinator")
        coordinator.suspend()
        before = run.pids()["local/1"]
        run.kill("local/1")
        time.sleep(1.0)
        coordinator.kill()
        again = lambda: any(c["member"] == "local/1" and c["pid"] != before for c in run.commits())  # noqa: E731
        run.until(again, "the lost member to train again")
        run.finish()
        run.check()


def test_killed_agent_ends_its_members_and_the_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:2", ("checkpoint.every_steps=3",), pause_s=0.05, epochs=6) as run:
        run.until_step(10)
        members = [psutil.Process(pid) for pid in run.pids().values()]
        run.service_process("agent").kill()
        _, alive = psutil.wait_procs(members, timeout=180)
        assert not alive, "members outlived their agent"
        run.finish()
        run.check()
        assert any("restored the checkpoint" in line for line in run.output.splitlines())


def test_no_process_survives_a_killed_shoal_run(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", pause_s=0.05, epochs=50, workers=1) as run:
        run.until_size(3)
        family = psutil.Process(run.process.pid).children(recursive=True)
        assert len(family) >= 6
        run.process.kill()
        _, alive = psutil.wait_procs(family, timeout=180)
        assert not alive, [p.cmdline() for p in alive]


def test_stopped_run_resumes_at_the_exact_step_with_another_number_of_members(tmp_path: Path) -> None:
    with checked_run(tmp_path, "3:3", pause_s=0.03, epochs=6) as run:
        run.until_step(8)
        name = run.shoal("ps")[0]["run"]
        run.shoal("stop", name)
        run.finish(exit_code=75)
        stopped_at = run.step()
        assert stopped_at < run.order().total_steps - 1
        run.process = run.start("resume", name, "-n", "2:2")
        run.finish()
        run.check()
        later = [c for c in run.commits() if c["step"] > stopped_at]
        assert min(c["step"] for c in later) == stopped_at + 1
        assert {c["size"] for c in later} == {2}


def test_second_machine_joins_a_running_run(tmp_path: Path) -> None:
    with checked_run(tmp_path, "1:1", pause_s=0.05, epochs=60) as run:
        run.until_step(3)
        home = next(run.home.glob("coordinators/*"))
        url = (home / "url").read_text().strip()
        second = run.start("join", url, "--token-file", str(home / "token"), "--name", "other", "--slots", "1")
        run.until(lambda: "other/0" in run.pids(), "the other machine's member, as a spare")
        run.shoal("scale", run.shoal("ps")[0]["run"], "1:2")
        run.until(lambda: any(c["member"] == "other/0" for c in run.commits()), "the other machine to train")
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0
        run.finish()
        run.check()
        assert not [e for e in run.journal() if e["kind"] == "WorldBroken"], "a machine that left broke a world"


def test_full_disk_costs_a_checkpoint_but_not_the_training(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("a small file system cannot be mounted here: it needs root")
    try:
        settings = ("checkpoint.every_steps=2", f"checkpoint.to={small}")
        with checked_run(tmp_path / "stage", "2:2", settings, width=96, epochs=2) as run:
            run.finish()
            run.check()
            assert "S5" in run.output
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_automatic_batch_size_is_equal_on_all_members_while_the_world_changes(tmp_path: Path) -> None:
    settings = ("batch=auto:16:256", "emulate=sample_s=0.0001,fixed_s=0.01,1")
    with checked_run(tmp_path, "2:3", settings, samples=2048, batch=32, epochs=6) as run:
        run.until_size(3)
        run.until_step(40)
        run.kill("local/0")
        run.until(lambda: [e for e in run.journal() if e["kind"] == "AdjustmentReported"], "a decision")
        run.kill("local/1")
        run.finish()
        run.check_steps(run.order().total_steps)
        assert run.order().size_changes, "the batch never changed"
        done = [e for e in run.events() if e["event"] == "done"]
        assert len({e["sum"] for e in done}) == 1, "members end with different states"


def test_agent_and_zygote_killed_at_once_leave_no_process_and_the_run_resumes(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:2", ("checkpoint.every_steps=3",), pause_s=0.05, epochs=6, workers=1) as run:
        run.until_step(10)
        agent = run.service_process("agent")
        family = agent.children(recursive=True)
        assert len(family) >= 4, "a warm process, members and their loaders"
        warm = agent.children()[0]
        # Both at once, so that neither can clean up after the other.
        warm.suspend()
        agent.kill()
        warm.kill()
        _, alive = psutil.wait_procs(family, timeout=180)
        assert not alive, [p.cmdline() for p in alive]
        run.finish()
        run.check()
        assert any("restored the checkpoint" in line for line in run.output.splitlines())
