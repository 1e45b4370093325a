"""The job of `benchmarks.evaluator`: a small CNN for some seconds, on a core of its own; so is its evaluator."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import shoal.torch as shoal

PLAN = json.loads(os.environ["PLAN"])
ROLE = os.environ.get("SHOAL_ROLE", "trainer")
CORES = sorted(os.sched_getaffinity(0))
BATCH, CLASSES = 64, 10


def main() -> None:
    if PLAN["pin"]:
        os.sched_setaffinity(0, {CORES[-1] if ROLE == "evaluator" else CORES[0]})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(2048, 3, 16, 16), torch.randint(0, CLASSES, (2048,))
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, CLASSES)),
    )
    run = shoal.join()
    model, optimizer = run.attach(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def score() -> dict[str, float]:
        """As much work as fits between two checkpoints, so that the evaluator is busy most of the time."""
        until = time.monotonic() + PLAN["score_s"]
        hits = 0
        while time.monotonic() < until:
            hits = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(256), y.split(256), strict=True))
        return {"accuracy": hits / len(x)}

    run.evaluate(score, best="max:accuracy")
    times: list[tuple[float, float]] = []
    ends_at = 0.0
    for a, b in run.batches(torch.utils.data.TensorDataset(x, y), BATCH, 10_000, seed=0):
        loss = nn.functional.cross_entropy(model(a), b)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.monotonic(), time.process_time()))
        ends_at = ends_at or times[0][0] + PLAN["seconds"]
        if times[-1][0] > ends_at:
            break
    if ROLE == "trainer":
        Path(PLAN["out"]).write_text(json.dumps(times))


if __name__ == "__main__":
    main()
