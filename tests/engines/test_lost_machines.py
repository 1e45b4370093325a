"""Machines without the user's disk: project and outputs survive the loss of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engines.test_pool_runs import SCRIPT, PoolRun, pool, pool_run

from shoal.store import checkpoint
from shoal.store.blob_store import open_store

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

STEPS = 100


def newest(run: PoolRun) -> int:
    where = next(run.home.glob("coordinators/*/runs/*"), run.home) / "checkpoints"
    found = checkpoint.newest(open_store(str(where)))
    return found.step if found is not None else -1


def test_run_resumes_on_another_machine_after_losing_all(tmp_path: Path) -> None:
    pools = "".join(
        pool(name, limit, shared=False, directory=str(tmp_path / "home" / name)).replace("False", "false")
        for name, limit in (("far", 2), ("farther", 1))
    )
    text = SCRIPT.read_text().replace('run.save(OUT / "final.pt")', 'print("saves", flush=True); run.save("final.pt")')
    settings = ("checkpoint.every_steps=10", "lease_s=1")
    with pool_run(tmp_path, "far,farther", "1:2", pools, *settings, script="train.py", steps=STEPS, text=text) as run:
        run.until_size(2)
        run.until(lambda: newest(run) >= 20, "a checkpoint at the coordinator")
        lost = {one["pid"] for one in run.events_of("ready")}
        for process in run.agents().values():
            process.kill()
        run.until(lambda: any(one["pid"] not in lost for one in run.commits()), "another one to go on")
        first = min(one["step"] for one in run.commits() if one["pid"] not in lost)
        last = max(one["step"] for one in run.commits() if one["pid"] in lost)
        assert 20 < first <= last + 1, "it went on where they were"
        assert not list(run.home.glob("far*/**/checkpoints/*")), "a checkpoint is on a machine that may be lost"
        run.finish(timeout_s=120)
        assert {one["step"] for one in run.events_of("done")} == {STEPS}
        assert set(torch.load(tmp_path / "project" / "final.pt")) == {"weight", "bias"}
        assert "downloaded final.pt" in run.output
        assert "| saves" in run.output
        run.check_leftovers()
