"""The job of `benchmarks.evaluator`: a small CNN trained for some seconds on one core, with its evaluator on another.

`evaluated.py stranger` scores as much, as often and on the same core, but belongs to no run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoal.torch as shoal

PLAN = json.loads(os.environ["PLAN"])
ROLE = os.environ.get("SHOAL_ROLE", "trainer")
BATCH, CLASSES = 64, 10
PATIENCE_S = 120.0


def begun(first_at: float) -> float:
    """Return the time at which measuring began, 0 if it has not: an evaluator must be at work first."""
    now = time.monotonic()
    if PLAN["scored"] and not (Path(PLAN["out"]) / "scoring").exists():
        if now > first_at + PATIENCE_S:
            raise TimeoutError(f"no evaluation began within {PATIENCE_S:.0f} s")
        return 0.0
    return now if now > first_at + PLAN["warm_up_s"] else 0.0


def made() -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """Return the samples, their classes and the model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, CLASSES)),
    )
    return torch.randn(2048, 3, 16, 16), torch.randint(0, CLASSES, (2048,)), model


def is_over() -> bool:
    return (Path(PLAN["out"]) / "steps.json").exists()


@torch.no_grad()
def score(x: torch.Tensor, y: torch.Tensor, model: nn.Module) -> dict[str, float]:
    """Score for most of the time between two checkpoints."""
    (Path(PLAN["out"]) / "scoring").touch()
    began = time.monotonic()
    until = began + PLAN["score_s"]
    hits = 0
    while time.monotonic() < until and not is_over():
        hits = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(256), y.split(256), strict=True))
    with (Path(PLAN["out"]) / "scores.jsonl").open("a") as told:
        told.write(json.dumps([began, time.monotonic()]) + "\n")
    return {"accuracy": hits / len(x)}


def stranger() -> None:
    """Score at intervals until the measured run is over."""
    os.sched_setaffinity(0, {PLAN["cores"]["evaluator"]})
    given = made()
    until = time.monotonic() + PATIENCE_S + 2 * PLAN["seconds"]
    while time.monotonic() < until and not is_over():
        score(*given)
        time.sleep(PLAN["every_s"] - PLAN["score_s"])


def main() -> None:
    if PLAN["cores"]:
        os.sched_setaffinity(0, {PLAN["cores"][ROLE]})
    x, y, model = made()
    run = shoal.join()
    model, optimizer = run.attach(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    run.evaluate(lambda: score(x, y, model), best="max:accuracy")
    times: list[tuple[float, float]] = []
    begins_at = 0.0
    for a, b in run.batches(torch.utils.data.TensorDataset(x, y), BATCH, 10_000, seed=0):
        loss = nn.functional.cross_entropy(model(a), b)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.monotonic(), time.process_time()))
        begins_at = begins_at or begun(times[0][0])
        if begins_at and times[-1][0] > begins_at + PLAN["seconds"]:
            break
    if ROLE == "trainer":
        (Path(PLAN["out"]) / "steps.json").write_text(json.dumps({"begins_at": begins_at, "steps": times}))


if __name__ == "__main__":
    stranger() if sys.argv[1:] == ["stranger"] else main()
