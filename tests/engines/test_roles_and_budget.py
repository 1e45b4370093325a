"""Runs with a separate evaluator pool, with a budget, and of several users, on real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engines.test_pool_runs import PoolRun, pool, pool_run
from tests.engines.test_shared_coordinator import Standing, standing  # noqa: F401 - a fixture

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]


def test_evaluator_keeps_a_machine_of_its_own_pool_until_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALUATED", "yes")
    pools = pool("spot", 2, price=1.0, instead=3.0) + pool("lab", 2, price=2.0) + 'labels = {kind = "lab"}\n'
    given = ("evaluator=true", "evaluator_on=lab", "checkpoint.every_steps=20")
    with pool_run(tmp_path, "spot", "1:2", pools, *given, steps=80) as run:
        run.until_size(2)
        named = lambda: sorted(name.rpartition("-")[0] for name in run.agents())  # noqa: E731
        run.until(lambda: named() == ["lab", "spot", "spot"], "the machines of all roles")
        run.finish(timeout_s=200)
        members = {e["member"] for e in run.events_of("ready")}
        assert all(name.startswith("lab-") == ("evaluator" in name) for name in members), members
        assert max(e["step"] for e in run.events_of("evaluated")) == 80
        run.check_leftovers()
        (bill,) = run.shoal("cost")
        assert set(bill["pools"]) == {"spot", "lab"}
        assert bill["total"]["spent"] > bill["total"]["unused"] > 0
        assert bill["pools"]["spot"]["saved"] == pytest.approx(2 * bill["pools"]["spot"]["spent"])


def test_run_over_budget_ends_with_a_checkpoint_and_resumes_with_more(tmp_path: Path) -> None:
    # A minute of one machine, which is what is kept to stop in order, costs 1.0.
    pools = pool("spot", 2, price=60.0)
    with pool_run(tmp_path, "spot", "1:2", pools, "budget=500", "checkpoint.every_s=600", steps=4000) as run:
        run.until_size(2)
        run.shoal("scale", run.name, "--budget", str(_spent(run) + 5.0))
        run.until_size(1)
        run.until_agents(1)
        assert any("the most expensive" in line["text"] for line in run.shoal("why", run.name))
        run.until_step(run.step() + 5)
        budget = _spent(run) + 1.1
        run.shoal("scale", run.name, "--budget", str(budget))
        assert run.process.wait(180) == 6
        run.check_leftovers()
        view = run.shoal("status", run.name)
        assert (view["status"], view["exit_code"], view["budget"]) == ("resumable", 6, budget)
        assert 0.1 < view["cost"]["spent"] <= budget
        assert view["checkpoint_step"] >= 5
        assert "reserved for a clean stop" in view["reason"]
        begun = {e["pid"] for e in run.events_of("ready")}
        run.process = run.start("resume", run.name, "--budget", "500")
        run.until(lambda: {e["pid"] for e in run.events_of("ready")} - begun, "a member that continues")
        run.until_step(view["checkpoint_step"] + 5)
        resumed = [e["step"] for e in run.events_of("commit") if e["pid"] not in begun]
        assert min(resumed) == view["checkpoint_step"] + 1
        run.shoal("stop", run.name)
        run.check_leftovers()


def _spent(run: PoolRun) -> float:
    return float(run.shoal("status", run.name)["cost"]["spent"])


def test_runs_of_several_users_queue_and_only_their_owner_may_change_them(standing: Standing) -> None:  # noqa: F811
    ada, bob = standing.user("ada"), standing.user("bob")
    path = standing.path
    first = standing.shoal("submit", "--on", "farm", "-n", "2", *ada, "train.py", "4000", where=path / "ada")
    standing.until(lambda: _view(standing, first["run"], ada)["world_size"] == 2, "a world of two")
    second = standing.shoal("submit", "--on", "farm", "-n", "2", *bob, "train.py", "5", where=path / "bob")
    hurry = ("--priority", "5", "--name", "urgent")
    urgent = standing.shoal("submit", "--on", "farm", *hurry, *bob, "train.py", "5", where=path / "bob")
    assert (first["user"], second["user"]) == ("ada", "bob")

    queue = {one["run"]: one for one in standing.shoal("ps", *ada, where=path)}
    assert [queue[run["run"]]["queued"] for run in (urgent, second, first)] == [1, 2, 0]
    assert f"held by {first['run']} (2)" in queue[second["run"]]["waits_for"]

    for verb in (("stop", first["run"]), ("scale", first["run"], "1:1"), ("why", first["run"])):
        problem = standing.shoal(*verb, *bob, where=path, code=4)
        assert problem["code"] == "S213"
        assert "belongs to ada, not to bob" in problem["what"]
    assert _view(standing, first["run"], bob)["status"] == "training", "every user may look"
    assert standing.shoal("cost", first["run"], *bob, where=path)["pools"]["farm"]["spent"] > 0

    # From anywhere, with nothing but the environment.
    standing.environ |= {"SHOAL_URL": standing.url, "SHOAL_TOKEN_FILE": str(standing.directory / "tokens" / "ada")}
    assert standing.shoal("scale", first["run"], "1:1", where=path)["members_max"] == 1
    standing.until(lambda: _view(standing, urgent["run"], bob)["status"] == "done", "the urgent run")
    standing.shoal("stop", "--now", first["run"], where=path)
    standing.until(lambda: _view(standing, second["run"], bob)["status"] == "done", "bob's other run")
    standing.until(lambda: not standing.agents(), "the machines to be given back")


def _view(standing: Standing, run: str, who: tuple[str, ...]) -> dict[str, Any]:  # noqa: F811
    view: dict[str, Any] = standing.shoal("status", run, *who, where=standing.path)
    return view
