"""`python -m benchmarks.exact`: cost of exact mode against the same micro-batches without it.

Every member trains two models, one in each mode, and alternates between them block by block, so that other load on the
machine affects both. Each model trains in a thread of its own, as a loop refuses foreign optimizers in its thread; only
one of them runs at a time. Members are processes with a real ring between them on loopback.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from benchmarks import job
from shoal.core.world import Address, Seat, World
from shoal.testing.threaded_world import FixedWorldSession
from shoal.torch.run import Run
from shoal.worker.collectives.ring import Ring

WARM_UP_STEPS = 3
MODES = ("micro", "exact")


def compare(model: str, members: int, batch: int, shards: int, blocks: int, steps: int, shares: str) -> dict[str, Any]:
    """Return the median seconds and CPU seconds of a step per block and mode, and the medians of the blocks' ratios.

    On a busy machine trust the CPU seconds, which exclude the work of other processes.
    """
    pairs = {mode: [_loopback_pair() for _ in range(members)] for mode in MODES}
    results, send = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    asked = (model, batch, shards, blocks, steps, shares)
    processes = [context.Process(target=_member, args=(rank, pairs, asked, send)) for rank in range(members)]
    for process in processes:
        process.start()
    found: dict[str, list[tuple[float, float]]] = results.recv() if results.poll(1800) else {}
    for process in processes:
        process.join(30)
    described: dict[str, Any] = {"model": model, "members": members, "batch": batch, "shards": shards, "shares": shares}
    for number, name in enumerate(("step_s", "cpu_s")):
        described[name] = {mode: [round(block[number], 5) for block in found[mode]] for mode in MODES}
        ratios = [one[number] / other[number] for one, other in zip(found["exact"], found["micro"], strict=True)]
        described[f"{name}_ratio"] = round(median(ratios), 4)
    return described


def _member(rank: int, pairs: dict[str, list[Any]], asked: tuple[Any, ...], send: Connection) -> None:
    torch.set_num_threads(1)
    model, batch, shards, blocks, steps, shares = asked
    loops = {mode: _loop(mode, _seated(rank, pairs[mode]), model, batch, shards, shares) for mode in MODES}
    threads = {mode: ThreadPoolExecutor(max_workers=1) for mode in MODES}
    for mode, loop in loops.items():
        threads[mode].submit(time_steps, loop, WARM_UP_STEPS).result()
    medians: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for block in range(blocks):
        for mode in MODES if block % 2 == 0 else reversed(MODES):
            began_s = time.process_time()
            step_s = median(threads[mode].submit(time_steps, loops[mode], steps).result())
            medians[mode].append((step_s, (time.process_time() - began_s) / steps))
    if rank == 0:
        send.send(medians)


def time_steps(loop: Iterator[None], count: int) -> list[float]:
    """Return the seconds of each of the next `count` steps of a loop."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        next(loop)
        took.append(time.perf_counter() - began)
    return took


def _loop(mode: str, session: FixedWorldSession, model: str, batch: int, shards: int, shares: str) -> Iterator[None]:
    """Train without end; yield once per committed step."""
    run, network, data = Run(session, mode, "unused"), job.build_model(model), job.build_dataset()
    optimizer = job.build_optimizer(network)
    run.attach(network, optimizer)
    how = {"exact": shards} if mode == "exact" else {"micro": -(-batch // shards)}
    for images, labels in run.batches(data, batch, epochs=1000, shares=shares, **how):
        run.backward(torch.nn.functional.cross_entropy(network(images), labels))
        optimizer.step()
        optimizer.zero_grad()
        if run.committed:
            yield


def _seated(rank: int, pairs: list[Any]) -> FixedWorldSession:
    names = [f"bench/{number}" for number in range(len(pairs))]
    world = World(1, tuple(Seat(name, "", Address("127.0.0.1", 0)) for name in names), 0, fresh=True)
    ends = (pairs[rank][0], pairs[rank - 1][1]) if len(pairs) > 1 else (None, None)
    return FixedWorldSession(rank, world, Ring(rank, names, *ends))


def _loopback_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exact", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--shares", default="equal")
    parser.add_argument("--only", default="cnn,wide")
    options = parser.parse_args()
    blocks = 3 if options.quick else 11
    for model, batch, steps in (("cnn", 128, 20), ("wide", 64, 4)):
        if model in options.only.split(","):
            found = compare(model, options.members, batch, options.shards, blocks, steps, options.shares)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
