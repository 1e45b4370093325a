"""Shoal's ring against torch.distributed's Gloo on loopback: time and CPU per operation, interleaved, as ratios.

python benchmarks/ring.py [--sizes 2,3,4] [--floats 1000,57000,1000000,25000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROUNDS = {1_000: 60, 57_000: 40, 1_000_000: 15, 25_000_000: 5}
REPORT_WIDTH = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="2,3,4")
    parser.add_argument("--floats", default=",".join(map(str, ROUNDS)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    floats = [int(count) for count in args.floats.split(",")]
    if args.rank is not None:
        _member(args.rank, args.size, floats, args.dir)
        return
    rows = [row for size in args.sizes.split(",") for row in _measure(int(size), args.floats)]
    print(f"{'n':>2} {'operation':<22}{'ring ms':>10}{'gloo ms':>10}{'time':>7}{'cpu':>7}   (ratios to Gloo)")
    for row in rows:
        print(
            f"{row['size']:>2} {row['operation']:<22}{row['ring_s'] * 1e3:>10.3f}{row['gloo_s'] * 1e3:>10.3f}"
            f"{row['time_ratio']:>7.2f}{row['cpu_ratio']:>7.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def _measure(size: int, floats: str) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as where:
        command = [sys.executable, __file__, "--size", str(size), "--floats", floats, "--dir", where]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        members = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(size)]
        try:
            if any(member.wait(timeout=300) for member in members):
                raise SystemExit("a member of the benchmark failed")
        finally:
            for member in members:
                member.kill()
        return list(json.loads(Path(where, "rows.json").read_text()))


def _member(rank: int, size: int, floats: list[int], where: Path) -> None:
    import torch
    import torch.distributed as dist

    from shoal.core.world import Address, Seat, World
    from shoal.worker.collectives.connect_ring import connect_ring
    from shoal.worker.transport.peers import Peers

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}/store", rank=rank, world_size=size)
    port = Peers(b"a token", "bench", f"m{rank}", "1", "127.0.0.1")
    addresses: list[tuple[str, int]] = [("", 0)] * size
    dist.all_gather_object(addresses, (port.address.host, port.address.port))
    seats = tuple(Seat(f"m{i}", "1", Address(*address)) for i, address in enumerate(addresses))
    ring = connect_ring(port, World(1, seats, 0), 10.0, threading.Event())
    rows = []

    def compare(name: str, rounds: int, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
        taken: dict[str, list[tuple[float, float]]] = {"ring": [], "gloo": []}
        for turn in range(rounds + 3):
            for which, operation in (
                (("ring", ours), ("gloo", theirs)) if turn % 2 else (("gloo", theirs), ("ring", ours))
            ):
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                operation()
                if turn >= 3:
                    taken[which].append((time.perf_counter() - start, time.process_time() - cpu))
        time_s = {which: statistics.median(time for time, _ in values) for which, values in taken.items()}
        cpu_s = {which: statistics.median(cpu for _, cpu in values) for which, values in taken.items()}
        rows.append(
            {
                "size": size,
                "operation": name,
                "ring_s": time_s["ring"],
                "gloo_s": time_s["gloo"],
                "time_ratio": time_s["ring"] / time_s["gloo"],
                "ring_cpu_s": cpu_s["ring"],
                "gloo_cpu_s": cpu_s["gloo"],
                "cpu_ratio": cpu_s["ring"] / cpu_s["gloo"],
            }
        )

    report, gathered = (
        np.arange(REPORT_WIDTH, dtype=np.float64),
        list(torch.zeros(size, REPORT_WIDTH, dtype=torch.float64)),
    )
    own_report = torch.from_numpy(report)
    compare(
        "gather of a step report",
        80,
        lambda: ring.gather(report).result(),
        lambda: dist.all_gather(gathered, own_report),
    )
    for count in floats:
        buffer, tensor = np.ones(count, np.float32), torch.ones(count)
        compare(
            f"sum of {count:,}",
            ROUNDS.get(count, 10),
            lambda buffer=buffer: ring.reduce(buffer).wait(),  # type: ignore[misc]
            lambda tensor=tensor: dist.all_reduce(tensor),  # type: ignore[misc]
        )
        buffer.fill(rank)
        ring.reduce(buffer).wait()
        assert (buffer == size * (size - 1) / 2).all()
    if rank == 0:
        Path(where, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    ring.close()
    port.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
