"""A run in exact mode whose members die, join and leave ends with the very bits of one undisturbed member.

This file is also the script that the members run: float32, ReLU, dropout and BatchNorm, where any difference shows.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.torch as shoal
from shoal.testing.scripts.hold import pause_while_held
from shoal.torch.state.capture import checksum

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

SAMPLES, BATCH, SHARDS = 500, 64, 16


def main() -> None:
    """Train as a member; FAULTS says when it kills itself, RECORDS where it writes its records."""
    plan, out = json.loads(os.environ.get("FAULTS", "{}")), Path(os.environ["RECORDS"])
    run = shoal.join()
    me = run.member.replace("/", "-")
    log = (out / f"{me}.{os.environ.get('SHOAL_INCARNATION', 'alone')}.jsonl").open("a", buffering=1)
    first_life = len(list(out.glob(f"{me}.*.jsonl"))) == 1
    deaths = {(d["step"], d["point"]) for d in plan.get("die", []) if d["member"] == run.member and first_life}

    def record(event: str, **fields: Any) -> None:
        base = {"event": event, "member": run.member, "pid": os.getpid(), "at": time.time()}
        log.write(json.dumps(base | fields) + "\n")

    def die(point: str) -> None:
        if (run.step, point) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(3)
    layers = [torch.nn.Linear(16, 48), torch.nn.BatchNorm1d(48), torch.nn.ReLU(), torch.nn.Dropout(0.2)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    list(model.parameters())[2].register_post_accumulate_grad_hook(lambda _: die("backward"))
    optimizer.register_step_post_hook(lambda *_: die("in the optimizer"))
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
    record("ready")
    for bx, by in run.batches(data, BATCH, plan.get("epochs", 4), seed=5, exact=SHARDS):
        step, world = run.step, run.world
        die("forward")
        run.backward(torch.nn.functional.mse_loss(model(bx), by))
        die("before the optimizer")
        optimizer.step()
        die("after")
        optimizer.zero_grad()
        if run.committed:
            time.sleep(plan.get("pause_s", 0.0))
            record("commit", step=step, world=world, size=run.size, sum=checksum({"m": model, "o": optimizer}))
            pause_while_held(out, step, plan.get("epochs", 4) * (SAMPLES // BATCH))
    run.save(out / "final.pt")
    record("done", step=run.step)


def check(run: Any) -> None:
    """Fail unless every member and the saved model are bitwise equal to a standalone process after every step."""
    saved = torch.load(run.records / "final.pt", weights_only=True)
    undisturbed = run.undisturbed(None)
    theirs = torch.load(undisturbed / "final.pt", weights_only=True)
    alone = {}
    for file in undisturbed.glob("*.jsonl"):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        alone = {e["step"]: e["sum"] for e in events if e["event"] == "commit"}
    assert len(alone) == run.plan["epochs"] * 8
    for commit in run.commits():
        where = f"{commit['member']} in world {commit['world']} of {commit['size']}"
        assert commit["sum"] == alone[commit["step"]], f"{where} has other bits after step {commit['step']}"
    assert {e["step"] for e in run.commits()} == set(alone)
    assert all(saved[key].numpy().tobytes() == theirs[key].numpy().tobytes() for key in theirs)


def exact_run(path: Path, members: str, settings: tuple[str, ...] = (), **plan: Any) -> Any:
    from tests.process.faults import checked_run

    class ExactRun(checked_run.CheckedRun):
        script = Path(__file__)

    return checked_run.contextlib.closing(ExactRun(path, members, settings, **plan))


def test_kill_at_any_point_of_a_step_keeps_the_result_bitwise_equal(tmp_path: Path) -> None:
    points = ("forward", "backward", "before the optimizer", "in the optimizer", "after")
    deaths = [{"member": f"local/{i % 4}", "step": 4 + 5 * i, "point": p} for i, p in enumerate(points[:4])]
    # A member that is late for the first world would miss the step in which it is to die.
    with exact_run(tmp_path, "2:4", ("regroup_s=60",), die=deaths, pause_s=0.03, epochs=5) as run:
        run.finish()
        check(run)
        assert len([e for e in run.journal() if e["kind"] == "ProcessExited" and e["fields"]["signal"] == 9]) == 4


def test_joins_departures_and_uneven_shares_keep_the_result_bitwise_equal(tmp_path: Path) -> None:
    with exact_run(tmp_path, "1:1", pause_s=0.04, epochs=16) as run:
        run.until_step(3)
        name = run.shoal("ps")[0]["run"]
        run.shoal("scale", name, "1:3")
        run.until_size(3)
        run.kill("local/1", signal.SIGTERM)
        run.until(lambda: any(c["size"] == 2 for c in run.commits()), "a world of two")
        run.kill("local/0")
        run.finish()
        check(run)
        assert {c["size"] for c in run.commits()} >= {1, 2, 3}


if __name__ == "__main__":
    main()
