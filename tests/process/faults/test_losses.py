"""Members die at every point of a step, one, two or all but one at once; no sample is lost or repeated."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.process.faults.checked_run import checked_run

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

POINTS = ("forward", "backward", "before the optimizer", "in the optimizer", "after")
# A member that is late for the first world would miss the step in which it is to die.
ALL = "regroup_s=60"


def test_kill_at_any_point_of_a_step_costs_no_sample(tmp_path: Path) -> None:
    deaths = [{"member": f"local/{i}", "step": 4 + 5 * i, "point": point} for i, point in enumerate(POINTS)]
    # With learned shares a member could have an empty share in the step in which it is to die.
    with checked_run(tmp_path, "2:5", (ALL,), die=deaths, shares="equal", pause_s=0.02, epochs=6) as run:
        run.finish()
        run.check()
        killed = [e for e in run.journal() if e["kind"] == "ProcessExited" and e["fields"]["signal"] == 9]
        assert len(killed) == len(POINTS)


def test_two_members_killed_at_once_cost_no_sample(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:4", pause_s=0.03, epochs=6) as run:
        run.until_size(4)
        pids = run.pids()
        for name in ("local/1", "local/2"):
            run.kill(name)
        run.until(lambda: len(set(run.pids().values()) - set(pids.values())) >= 2, "two new processes")
        run.finish()
        run.check()


def test_last_member_continues_when_all_others_are_killed(tmp_path: Path) -> None:
    with checked_run(tmp_path, "1:4", pause_s=0.03, epochs=6) as run:
        run.until_size(4)
        survivor = run.pids()["local/3"]
        for name in ("local/0", "local/1", "local/2"):
            run.kill(name)
        run.until(lambda: any(c["size"] == 1 for c in run.commits()), "a world of one")
        run.finish()
        assert run.pids().get("local/3", survivor) == survivor
        run.check()


def test_death_after_the_last_step_repeats_no_training(tmp_path: Path) -> None:
    deaths = [{"member": "local/1", "step": 32, "point": "at the end"}]
    with checked_run(tmp_path, "2:2", die=deaths) as run:
        run.finish()
        run.check()
        assert max(Counter(c["step"] for c in run.commits()).values()) == 2, "steps were done again"


def test_run_is_not_done_if_its_last_member_dies_before_saving_the_model(tmp_path: Path) -> None:
    deaths = [{"member": "local/0", "step": 32, "point": "at the end"}]
    with checked_run(tmp_path, "1:1", ("checkpoint.every_steps=20",), die=deaths) as run:
        run.finish(exit_code=75)
        assert "no member reached the end of the script: local/0" in run.output
        run.process = run.start("resume", run.shoal("ps", "--all")[0]["run"])
        run.finish()
        run.check()


def test_another_member_saves_the_model_if_the_first_dies_while_saving(tmp_path: Path) -> None:
    """Check that the claim passes on even after training has finished."""
    deaths = [{"member": "local/0", "step": 32, "point": "saving"}]
    with checked_run(tmp_path, "2:2", die=deaths) as run:
        run.finish()
        run.check()


def test_loss_of_a_member_restarts_no_other(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", pause_s=0.03, epochs=4) as run:
        run.until_size(3)
        before = run.pids()
        run.kill("local/1")
        run.until(lambda: run.pids().get("local/1", before["local/1"]) != before["local/1"], "local/1 to be back")
        after = run.pids()
        assert (after["local/0"], after["local/2"]) == (before["local/0"], before["local/2"])
        run.finish()
        run.check()


def test_stopped_member_is_left_behind_and_rejoins_when_it_wakes(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", ("lease_s=2",), pause_s=0.05, epochs=20) as run:
        run.until_size(3)
        pid = run.pids()["local/2"]
        run.kill("local/2", signal.SIGSTOP)
        run.until_size(2)
        run.kill("local/2", signal.SIGCONT)
        run.until_size(3)
        assert run.pids()["local/2"] == pid, "the process that woke up was replaced"
        run.finish()
        run.check()


def test_member_that_hung_during_a_commit_rejoins_when_it_wakes(tmp_path: Path) -> None:
    die = [{"member": "local/2", "step": 6, "point": "in the optimizer"}]
    settings = (ALL, "lease_s=2", "shares.policy=equal")
    with checked_run(tmp_path, "2:3", settings, pause_s=0.05, epochs=20, die=die, die_by="SIGSTOP") as run:
        run.until(run.commits, "the first step")
        pid = run.pids()["local/2"]
        run.until_size(2)
        run.kill("local/2", signal.SIGCONT)
        back = lambda: any(c["member"] == "local/2" and c["world"] > 1 for c in run.commits())  # noqa: E731
        run.until(back, "the member that hung to train again")
        assert run.pids()["local/2"] == pid, "the process that woke up was replaced"
        run.finish()
        run.check()


def test_member_with_a_hung_script_is_restarted(tmp_path: Path) -> None:
    die = [{"member": "local/2", "step": 6, "point": "forward"}]
    settings = (ALL, "hang_timeout_s=2", "shares.policy=equal")
    with checked_run(tmp_path, "2:3", settings, pause_s=0.05, epochs=20, die=die, die_by="hang") as run:
        run.until(run.commits, "the first step")
        pid = run.pids()["local/2"]
        run.until(lambda: run.journal("MemberLost"), "the hang to be detected")
        back = lambda: any(c["member"] == "local/2" and c["world"] > 1 for c in run.commits())  # noqa: E731
        run.until(back, "another in its place")
        assert run.pids()["local/2"] != pid
        run.finish()
        run.check()
        (lost,) = [e["fields"] for e in run.journal("MemberLost") if e["fields"]["hung"]]
        assert (lost["member"], "while all other members wait" in lost["reason"]) == ("local/2", True)


def test_raising_script_is_retried_and_then_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:2", ("restarts.user=1", "backoff_s=0.05"), raise_at=4, raise_in="local/1") as run:
        run.finish(exit_code=1)
        assert "the script is wrong" in run.output


def test_training_waits_while_there_are_too_few_members(tmp_path: Path) -> None:
    with checked_run(tmp_path, "3:3", pause_s=0.02, epochs=4) as run:
        run.until_size(3)
        run.kill("local/0")
        run.finish()
        assert all(c["size"] == 3 for c in run.commits())
        assert "2 of at least 3 members are present" in run.output
        run.check()


def test_dataloader_workers_outlive_neither_their_member_nor_a_change_of_world(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", workers=1, pause_s=0.03, epochs=4) as run:
        run.until_size(3)
        run.kill("local/1")
        run.finish()
        run.check()


def test_accumulated_micro_batches_are_repeated_as_one_step(tmp_path: Path) -> None:
    deaths = [{"member": "local/1", "step": 5, "point": "backward"}]
    with checked_run(tmp_path, "2:3", micro=8, die=deaths, epochs=3) as run:
        run.finish()
        run.check()


def test_gradients_can_be_exchanged_over_gloo(tmp_path: Path) -> None:
    deaths = [{"member": "local/1", "step": 5, "point": "backward"}]
    with checked_run(tmp_path, "2:3", ("exchange=gloo",), die=deaths, pause_s=0.02, epochs=4) as run:
        run.finish()
        run.check()


def test_compiled_model_survives_a_loss(tmp_path: Path) -> None:
    deaths = [{"member": "local/1", "step": 5, "point": "backward"}]
    with checked_run(tmp_path, "2:2", compile="aot_eager", die=deaths, pause_s=0.02, epochs=3) as run:
        run.finish()
        run.check()


def test_stream_is_read_exactly_once_through_deaths_and_joins(tmp_path: Path) -> None:
    deaths = [{"member": f"local/{i}", "step": 4 + 6 * i, "point": point} for i, point in enumerate(POINTS[:3])]
    with checked_run(tmp_path, "2:3", (ALL,), shards=10, samples=530, die=deaths, pause_s=0.03, epochs=4) as run:
        run.finish()
        done = [e for e in run.events() if e["event"] == "done"]
        assert len({e["sum"] for e in done}) == 1
        killed = [e for e in run.journal() if e["kind"] == "ProcessExited" and e["fields"]["signal"] == 9]
        assert len(killed) == len(deaths)
        run.check_parameters(torch.load(run.records / "final.pt", weights_only=True))


def test_member_that_runs_out_of_memory_repeats_the_step_in_smaller_micro_batches(tmp_path: Path) -> None:
    # Shares of 21 or 22 samples fit in three micro-batches; with learned shares it might later get 10, which do not.
    with checked_run(tmp_path, "3:3", fits={"local/1": 9}, shares="equal", pause_s=0.02, epochs=6) as run:

        def reported() -> list[int]:
            adjustments = [e["fields"] for e in run.journal("AdjustmentReported") if e["fields"]["what"] == "memory"]
            return [fields["values"]["local/1"] for fields in adjustments]

        run.until_step(8)
        run.until(reported, "the report of the micro-batch size")
        before = reported()
        run.kill("local/1")
        run.finish()
        run.check()
        assert reported() == before, "the restarted member forgot its micro-batch size"
        assert all(size < 22 for size in before)
