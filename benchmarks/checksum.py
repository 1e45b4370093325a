"""`python -m benchmarks.checksum`: cost of comparing the members' states, with 0.1 M and with 26 M parameters.

Two members, threads of one process with a real ring between them, train with Adam, whose state is twice the model. Each
trains two models, one with the check and one without, and alternates between them block by block, so that other load on
the machine affects both. `cost` is what the check itself took, over the time of all steps after the dense checks of the
first ones; `ratio` compares the median steps of both sides and shows that nothing else became slower.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks import job
from shoal.core.world import Address, Seat, World
from shoal.testing.threaded_world import FixedWorldSession
from shoal.torch.run import Run
from shoal.worker.collectives.ring import Ring

NAMES = ["bench/0", "bench/1"]
MODES = ("off", "stop")
CASES = {"small": ("0.1 M parameters", 128, 60, 1500), "wide": ("26 M parameters", 64, 4, 150)}


def measure(case: str, quick: bool) -> dict[str, Any]:
    """Return the cost of the check and the ratio of steps with and without it, of one model."""
    described, batch, steps, warm_up = CASES[case]
    blocks, warm_up = (3, warm_up // 5) if quick else (11, warm_up)
    pairs = {mode: [socket.socketpair() for _ in NAMES] for mode in MODES}
    medians: dict[str, list[float]] = {mode: [] for mode in MODES}
    spent: list[float] = []

    def work(rank: int) -> None:
        loops = {mode: _loop(case, batch, _seated(rank, mode, pairs[mode]), spent) for mode in MODES}
        for mode in MODES:
            _steps(loops[mode], warm_up if mode == "stop" else 3)
        if rank == 0:
            spent.clear()
        for block in range(blocks):
            for mode in MODES if block % 2 == 0 else reversed(MODES):
                took = _steps(loops[mode], steps)
                if rank == 0:
                    medians[mode].append(median(took))
                    spent.extend([-second for second in took] if mode == "stop" else [])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(NAMES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checks = [seconds for seconds in spent if seconds > 0]
    trained_s = -sum(seconds for seconds in spent if seconds < 0)
    ratios = [on / off for off, on in zip(medians["off"], medians["stop"], strict=True)]
    return {
        "model": described,
        "step_ms": round(1e3 * median(medians["stop"]), 2),
        "checks": len(checks),
        "check_ms": round(1e3 * median(checks), 2) if checks else None,
        "cost": round(sum(checks) / trained_s, 5),
        "ratio": round(median(ratios), 4),
    }


def _loop(case: str, batch: int, session: FixedWorldSession, spent: list[float]) -> Iterator[None]:
    """Train without end; yield once per step, and let rank 0 note how long its checks took."""
    run, data = Run(session, "checksum", "unused"), job.build_dataset()
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    model = model if case == "small" else job.build_model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    run.attach(model, optimizer)
    for images, labels in run.batches(data, batch, epochs=100_000, shares="equal"):
        run.backward(torch.nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
        digest = run._trainer.current.digest if run._trainer.current is not None else None
        if session.rank == 0 and digest is not None:
            spent.append(digest.seconds)
        yield


def _steps(loop: Iterator[None], count: int) -> list[float]:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        next(loop)
        took.append(time.perf_counter() - began)
    return took


def _seated(rank: int, mode: str, pairs: list[Any]) -> FixedWorldSession:
    world = World(1, tuple(Seat(name, "", Address("127.0.0.1", 0)) for name in NAMES), 0, fresh=True)
    session = FixedWorldSession(rank, world, Ring(rank, NAMES, pairs[rank][0], pairs[rank - 1][1]))
    session.settings = msgspec.structs.replace(session.settings, on_divergence=mode)
    return session


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checksum", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="small,wide")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in options.only.split(","):
        print(json.dumps(measure(case, options.quick)), flush=True)


if __name__ == "__main__":
    main()
