"""`python -m benchmarks.checksum`: cost of comparing the members' states, with 0.1 M and with 26 M parameters.

Two members, threads of one process with a real ring between them, train with Adam, whose state is twice the model.
`cost` is what the checks took over the time of all steps, after the dense checks of the first ones. Then blocks of
steps with and without the check alternate in the same run, so that other load on the machine affects both: `ratio`
compares their median steps and shows that nothing else becomes slower.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
from collections.abc import Iterator
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks import job
from benchmarks.exact import time_steps
from shoal.core.world import Address, Seat, World
from shoal.testing.threaded_world import FixedWorldSession
from shoal.torch.run import Run
from shoal.worker.collectives.ring import Ring
from shoal.worker.training.step import Step

NAMES = ["bench/0", "bench/1"]
# The size of the global batch, and how many steps are warm-up, measured, and in one block.
CASES = {"0.1 M": (128, 150, 600, 30), "26 M": (64, 60, 120, 6)}


def measure(case: str, quick: bool) -> dict[str, Any]:
    """Return the cost of the check and the ratio of steps with and without it, of one model."""
    batch, warm_up, measured, block = CASES[case]
    blocks, measured = (3, measured // 3) if quick else (11, measured)
    pairs = [socket.socketpair() for _ in NAMES]
    found: dict[str, Any] = {}

    def work(rank: int) -> None:
        session, checks = _seated(rank, pairs), list[float]()
        loop = _loop(case, batch, session, checks)
        time_steps(loop, warm_up)
        checks.clear()
        took = time_steps(loop, measured)
        cost, check_s, count = sum(checks) / sum(took), median(checks or [0.0]), len(checks)
        ratios = []
        for _ in range(blocks):
            medians = {}
            for mode in ("off", "stop"):
                session.settings = msgspec.structs.replace(session.settings, on_divergence=mode)
                medians[mode] = median(time_steps(loop, block))
            ratios.append(medians["stop"] / medians["off"])
        if rank == 0:
            found.update(step_ms=round(1e3 * median(took), 2), check_ms=round(1e3 * check_s, 2), checks=count)
            found.update(steps=measured, cost=round(cost, 5), ratio=round(median(ratios), 4))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(NAMES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"parameters": case} | found


def _loop(case: str, batch: int, session: FixedWorldSession, checks: list[float]) -> Iterator[None]:
    """Train without end; yield once per step, and note how long checks took."""
    run, data = Run(session, "checksum", "unused"), job.build_dataset()
    small = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    model = small if case == "0.1 M" else job.build_model("wide")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)  # threads share a random generator
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    run.attach(model, optimizer)
    for images, labels in run.batches(data, batch, epochs=100_000, shares="equal"):
        run.backward(torch.nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
        current = run._trainer.current
        assert isinstance(current, Step)
        if current.digest is not None:
            checks.append(current.digest.seconds)
        yield


def _seated(rank: int, pairs: list[Any]) -> FixedWorldSession:
    world = World(1, tuple(Seat(name, "", Address("127.0.0.1", 0)) for name in NAMES), 0, fresh=True)
    return FixedWorldSession(rank, world, Ring(rank, NAMES, pairs[rank][0], pairs[rank - 1][1]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checksum", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in options.only.split(","):
        print(json.dumps(measure(case, options.quick)), flush=True)


if __name__ == "__main__":
    main()
