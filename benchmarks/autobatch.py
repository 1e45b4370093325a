"""`auto` against a sweep of fixed batches: seconds of real training until the same loss, as ratios of one run.

python -m benchmarks.autobatch [--quick] [--json FILE]

A small classifier learns from generated data by SGD with momentum, or by Adam. Every side has the same start, data and
learning rate for a batch of 32, which the same rule scales to its own batch; `auto` chooses its batch. The batch of a
step is cut into unequal pieces, which stand for members. Sides take turns, so that other load on the machine affects
all of them. A step costs the CPU time of its thread plus the time of an emulated exchange (`exchange_s`).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.core.batch.auto_batch import AutoBatch, BatchChange
from shoal.core.batch.goodput import StepSeconds, lr_scaling_for
from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.data.sample_order import SampleOrder
from shoal.core.shares import split as shares_split

BASE, BOUNDS = 32, (8, 2048)
SWEEP = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
PIECES = (3, 1)
SAMPLES, WIDTH, CLASSES = 60_000, 64, 10
GOAL = 1.10
# A side that has taken so many times as long as the first to arrive is given up.
HOPELESS = 3.0
TURN_S = 0.05


@dataclass(frozen=True, slots=True)
class Task:
    """The target loss, the cost of an exchange, and the optimizer."""

    name: str
    target: float
    exchange_s: float
    make: Callable[..., torch.optim.Optimizer]


SGD = partial(torch.optim.SGD, lr=0.003, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.0002)
TASKS = (
    Task("SGD, one machine", 1.15, 0.0, SGD),
    Task("SGD, exchange of 5 ms", 1.15, 0.005, SGD),
    Task("SGD, exchange of 50 ms", 1.15, 0.05, SGD),
    Task("Adam, one machine", 1.15, 0.0, ADAM),
    Task("Adam, exchange of 50 ms", 1.15, 0.05, ADAM),
)


class Costs:
    """Cost of a step, fitted to the measured sizes: seconds = fixed + per sample."""

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = defaultdict(list)

    def add(self, size: int, seconds: float) -> None:
        self._seen[size] = [*self._seen[size][-29:], seconds]

    @property
    def sure(self) -> bool:
        return len(self._seen) > 1

    def model(self) -> StepSeconds:
        fixed, each = self._fit()
        return lambda size: fixed + each * size

    def _fit(self) -> tuple[float, float]:
        points = [(size, statistics.median(seconds)) for size, seconds in self._seen.items()]
        if len(points) < 2:
            return 0.0, points[0][1] / points[0][0]
        # Relative errors: every size counts the same.
        rows = torch.tensor([[1.0 / s, n / s] for n, s in points], dtype=torch.float64)
        fixed, each = (
            torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64)).solution.flatten().tolist()
        )
        return max(fixed, 0.0), max(each, 1e-9)


@dataclass
class Side:
    """One training run with a fixed batch, or with `auto` if the batch is None."""

    size: int | None
    model: torch.nn.Module
    task: Task
    seed: int
    taken_s: float = 0.0
    steps: int = 0
    arrived: bool = False
    decisions: list[BatchChange] = field(default_factory=list)

    def train(self, data: tuple[torch.Tensor, ...], check: tuple[torch.Tensor, ...]) -> Iterator[None]:
        """Train step by step until the target is reached."""
        bounds = BOUNDS if self.size is None else (self.size, self.size)
        optimizer = self.task.make(self.model.parameters())
        rate: float = optimizer.param_groups[0]["lr"]
        auto, noise, costs = AutoBatch(BASE, bounds, lr_scaling_for(type(optimizer).__name__)), GradientNoise(), Costs()
        order = SampleOrder(SAMPLES, auto.size_at(0), epochs=1000, seed=self.seed)
        smooth, checked_at = None, 0
        while not self.arrived:
            size, ids = order.size_of(self.steps), torch.from_numpy(order.ids(self.steps, 0, order.size_of(self.steps)))
            began = time.thread_time()
            optimizer.param_groups[0]["lr"] = rate * auto.lr_gain_at(self.steps, size)
            shares = shares_split.split(size, PIECES)
            squares, total_sq = self._gradients(shares, [tensor[ids] for tensor in data], optimizer)
            optimizer.step()
            took_s = time.thread_time() - began + self.task.exchange_s
            self.taken_s += took_s
            costs.add(size, took_s)
            noise.observe(shares, squares, total_sq)
            decision = auto.on_commit(self.steps, size, noise, costs.model(), costs_known=costs.sure)
            if decision is not None:
                self.decisions.append(decision)
                order = order.change_size(decision.step, decision.size)
            self.steps += 1
            checked_at += size
            if checked_at >= 512:
                checked_at = 0
                loss = self._loss(check)
                smooth = loss if smooth is None else 0.5 * smooth + 0.5 * loss
                self.arrived = smooth < self.task.target
            yield

    def _gradients(
        self, shares: shares_split.Shares, batch: list[torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> tuple[list[float], float]:
        """Store the gradient of the batch in the parameters; return the squared norms of the pieces and of it."""
        parameters, size, start = list(self.model.parameters()), sum(shares), 0
        whole = [torch.zeros_like(parameter) for parameter in parameters]
        squares = []
        for share in shares:
            x, y = (tensor[start : start + share] for tensor in batch)
            start += share
            if not share:
                squares.append(0.0)
                continue
            gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(self.model(x), y), parameters)
            squares.append(_square(gradients, optimizer))
            for total, gradient in zip(whole, gradients, strict=True):
                total.add_(gradient, alpha=share / size)
        for parameter, total in zip(parameters, whole, strict=True):
            parameter.grad = total
        return squares, _square(whole, optimizer)

    @torch.no_grad()
    def _loss(self, check: tuple[torch.Tensor, ...]) -> float:
        return float(torch.nn.functional.cross_entropy(self.model(check[0]), check[1]))


def _square(gradients: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Return the squared norm of gradients as the optimizer uses them: Adam divides each by its usual size."""
    total = 0.0
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        state = optimizer.state[parameter]
        if "exp_avg_sq" in state:
            # Without the correction for its start, the first hundred steps would count for far too much.
            known = 1.0 - optimizer.param_groups[0]["betas"][1] ** float(state["step"])
            usual = (state["exp_avg_sq"] / known).sqrt()
            # Units that have hardly been used yet would count for nearly everything.
            gradient = gradient / (usual + 0.1 * usual.mean() + 1e-12)
        total += float(gradient.square().sum())
    return total


def generated(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples labelled by a fixed random network, a tenth of them wrongly."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES + 2000, WIDTH, generator=chance)
    hidden = torch.tanh(x @ torch.randn(WIDTH, 32, generator=chance) / WIDTH**0.5)
    y = (hidden @ torch.randn(32, CLASSES, generator=chance)).argmax(1)
    wrong = torch.rand(len(y), generator=chance) < 0.1
    return x, torch.where(wrong, torch.randint(CLASSES, y.shape, generator=chance), y)


def race(task: Task, seed: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Train all sides in turns and return the seconds that each took."""
    torch.manual_seed(seed)
    x, y = generated(seed)
    layers = torch.nn.Linear(WIDTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, CLASSES))
    sides = [Side(size, copy.deepcopy(model), task, seed) for size in (*sizes, None)]
    runs = {id(s): s.train((x[:SAMPLES], y[:SAMPLES]), (x[SAMPLES:], y[SAMPLES:])) for s in sides}
    racing = list(sides)
    while racing:
        side = min(racing, key=lambda one: one.taken_s)
        until = side.taken_s + TURN_S
        while side.taken_s < until and not side.arrived:
            next(runs[id(side)], None)
        first_s = min((one.taken_s for one in sides if one.arrived), default=float("inf"))
        racing = [one for one in racing if not one.arrived and one.taken_s < HOPELESS * first_s]
    return {
        "seconds": {_name(s): s.taken_s if s.arrived else None for s in sides},
        "steps": {_name(s): s.steps for s in sides},
        "decisions": [[d.step, d.size, d.reason] for d in sides[-1].decisions],
    }


def compare(quick: bool, only: str = "") -> list[dict[str, Any]]:
    """Return, for every task, the seconds of each side and the ratio of `auto` to the best fixed batch."""
    torch.set_num_threads(1)
    found = []
    for task in TASKS[1:2] if quick else (task for task in TASKS if only in task.name):
        races = [race(task, seed, SWEEP[1:7:2] if quick else SWEEP) for seed in range(1 if quick else 5)]
        seconds = {name: [one["seconds"][name] for one in races] for name in races[0]["seconds"]}
        fixed = {name: statistics.median(s) for name, s in seconds.items() if name != "auto" and None not in s}
        best = min(fixed, key=fixed.__getitem__, default=None)
        ratio = None
        if best is not None and None not in seconds["auto"]:
            ratio = statistics.median(a / b for a, b in zip(seconds["auto"], seconds[best], strict=True))
        found.append(
            {"task": task.name, "best": best, "ratio": ratio, "goal": GOAL, "seconds": seconds, "races": races}
        )
        print(f"{task.name}: auto takes {ratio or float('nan'):.3f} x the best fixed batch, {best}", file=sys.stderr)
    return found


def _name(side: Side) -> str:
    return "auto" if side.size is None else str(side.size)


def render(found: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the seconds to the target by batch."""
    names = list(found[0]["seconds"])
    lines = [f"| seconds to the target | {' | '.join(names)} | auto / best |", "| --- " * (len(names) + 2) + "|"]
    for one in found:
        cells = ["-" if None in s else f"{statistics.median(s):.2f}" for s in one["seconds"].values()]
        met = "-" if one["ratio"] is None else f"{one['ratio']:.3f} ({'≤' if one['ratio'] <= GOAL else '>'} {GOAL})"
        lines.append(f"| {one['task']} | {' | '.join(cells)} | {met} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autobatch", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="only tasks whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = compare(options.quick, options.only)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(render(found))


if __name__ == "__main__":
    main()
