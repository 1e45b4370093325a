"""`step` against `local:H` at 4:1 speeds: seconds and bytes until the same loss, side by side in one run.

python -m benchmarks.local [--quick] [--json FILE]

A small classifier learns handwritten digits. Two members behave like machines of speeds 1 and 0.25 and are joined by an
emulated link. Every side is measured with several learning rates and seeds, and counts with its own best rate: at one
rate for all, the side that it suits best would win. The loss is that of held-out digits with the common parameters
after a step or a round, averaged over a few of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.functional import cross_entropy

from shoal.testing.emulated_speeds import emulated, machines
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.run import Run
from shoal.worker.collectives.exchange import Exchange, Work

BATCH, WIDTH = 64, 64
RATES, SEEDS = (0.05, 0.1, 0.2, 0.4), (0, 1, 2)
SAMPLE_S = 0.0004
TARGET = 0.15
SMOOTH = 0.5


@dataclass(frozen=True, slots=True)
class Link:
    """Emulated link: extra time of a reduction."""

    name: str
    latency_s: float
    bytes_per_s: float


LINKS = (Link("none", 0.0, float("inf")), Link("10 Mbit/s", 0.02, 1.25e6))


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train: the mode, the outer optimizer, and the treatment of the inner optimizer's state."""

    sync: str
    lr: float = 1.0
    momentum: float = 0.0
    inner: str = "kept"
    shares: str = "model"

    @property
    def name(self) -> str:
        outer = f"outer {self.lr:g}/{self.momentum:g}" if (self.lr, self.momentum) != (1.0, 0.0) else ""
        inner = f"inner {self.inner}" if self.inner != "kept" else ""
        return " ".join(filter(None, (self.sync, self.shares if self.shares != "model" else "", outer, inner)))


@dataclass(slots=True)
class Result:
    """Cost of a side until it reached the target or was given up."""

    side: str
    link: str
    seconds: float | None
    samples: int
    bytes_per_sample: float
    loss: float
    busiest_batches: int
    rate: float = 0.0
    never: int = 0


class Linked:
    """An exchange over an emulated slow link, which counts the bytes sent."""

    def __init__(self, real: Exchange, link: Link) -> None:
        self.rank, self.size, self.sent_bytes = real.rank, real.size, 0.0
        self._real, self._link, self._free_s = real, link, 0.0

    def gather(self, record: Any) -> Any:
        self.sent_bytes += record.nbytes * (self.size - 1)
        return self._real.gather(record)

    def reduce(self, buffer: Any, *how: Any) -> Work:
        # What a ring sends: all but one part, once to sum it up and once to spread the sum.
        sent = 2 * buffer.nbytes * (self.size - 1) / self.size
        self.sent_bytes += sent
        self._free_s = max(self._free_s, time.monotonic()) + self._link.latency_s + sent / self._link.bytes_per_s
        return _Slow(self._real.reduce(buffer, *how), self._free_s)

    def barrier(self) -> None:
        self._real.barrier()

    def abort(self, cause: str) -> None:
        self._real.abort(cause)

    def close(self) -> None:
        self._real.close()


class _Slow:
    def __init__(self, real: Work, until_s: float) -> None:
        self._real, self._until_s = real, until_s

    def wait(self) -> None:
        self._real.wait()
        time.sleep(max(0.0, self._until_s - time.monotonic()))


def digits() -> tuple[torch.utils.data.TensorDataset, torch.Tensor, torch.Tensor]:
    """Return handwritten digits for training and held-out ones."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)
    held = torch.arange(len(inputs)) % 5 == 0
    return torch.utils.data.TensorDataset(inputs[~held], labels[~held]), inputs[held], labels[held]


def measure(side: Side, link: Link, rate: float, seed: int, epochs: int = 60) -> Result:
    """Train one side with two members until its loss is below the target."""
    text = machines(1, 0.25, sample_s=SAMPLE_S)
    data, inputs, labels = digits()
    torch.manual_seed(seed)
    start = _model().state_dict()

    def body(session: FixedWorldSession) -> Result:
        settings = {"sync": side.sync, "outer_lr": side.lr, "outer_momentum": side.momentum, "noise_every_steps": 0}
        session.settings = msgspec.structs.replace(session.settings, **settings)
        assert session.exchange is not None
        linked = Linked(session.exchange, link)
        session.exchange = linked
        run, model = Run(session, "bench", "unused"), _model()
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        run.attach(model, optimizer)
        linked.barrier()
        began, samples, smooth, batches, most = time.monotonic(), 0, None, 0, 0
        result = Result(side.name, link.name, None, 0, 0.0, float("nan"), 0)
        for x, y in run.batches(data, BATCH, epochs, seed=seed, shares=side.shares):
            batches += 1
            optimizer.zero_grad()
            run.backward(cross_entropy(model(x), y))
            optimizer.step()
            if not run.committed:
                continue
            most, batches = max(most, batches), 0
            samples += sum(p.samples for p in run._trainer.current.reports)
            _inner(side.inner, optimizer, linked)
            with torch.no_grad():
                loss = cross_entropy(model(inputs), labels).item()
            # All members have the same parameters, hence the same loss, and leave the loop at the same time.
            smooth = loss if smooth is None else SMOOTH * smooth + (1 - SMOOTH) * loss
            result = Result(side.name, link.name, None, samples, linked.sent_bytes / samples, smooth, most)
            if smooth < TARGET:
                result.seconds = time.monotonic() - began
                break
        return result

    return together(2, emulated(body, text))[0]


def best(side: Side, link: Link, rates: tuple[float, ...], seeds: tuple[int, ...]) -> Result:
    """Return the median over seeds at the fastest rate; `never` counts seeds that did not reach the target."""
    found = []
    for rate in rates:
        results = [measure(side, link, rate, seed) for seed in seeds]
        middle = statistics.median_low([one.seconds or float("inf") for one in results])
        shown = next(one for one in results if (one.seconds or float("inf")) == middle)
        shown.rate, shown.never = rate, sum(one.seconds is None for one in results)
        found.append(shown)
    return min(found, key=lambda one: one.seconds or float("inf"))


def _inner(what: str, optimizer: torch.optim.Optimizer, exchange: Linked) -> None:
    """Keep, reset or average the inner optimizer's state after a round."""
    if what == "reset":
        optimizer.state.clear()
    elif what == "averaged":
        for state in optimizer.state.values():
            buffer = state["momentum_buffer"]
            exchange.reduce(buffer.view(-1).numpy()).wait()
            buffer.div_(exchange.size)


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))


SIDES = (
    Side("step", shares="equal"),
    Side("step"),
    Side("local:4"),
    Side("local:16"),
    Side("local:16", 0.7, 0.5),
    Side("local:16", inner="averaged"),
    Side("local:16", inner="reset"),
    Side("local:64"),
    Side("local:64", 0.7, 0.5),
)
QUICK = (Side("step", shares="equal"), Side("step"), Side("local:8"))


def table(results: list[Result]) -> str:
    """Return the results as text, those of each link as ratios to its `step`."""
    head = ("link", "mode", "rate", "seconds", "of step", "samples", "bytes/sample", "loss")
    lines = ["{:>10} {:<28} {:>5} {:>8} {:>8} {:>8} {:>13} {:>6}".format(*head)]
    for one in results:
        base = next((r.seconds for r in results if r.link == one.link and r.side == "step"), None)
        seconds = f"{one.seconds:.2f}" if one.seconds else "never"
        ratio = f"{one.seconds / base:.2f}" if one.seconds and base else ""
        named = f"{one.link:>10} {one.side:<28} {one.rate:>5g} {seconds:>8} {ratio:>8}"
        lines.append(f"{named} {one.samples:>8} {one.bytes_per_sample:>13.1f} {one.loss:>6.3f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    links, sides, rates, seeds = LINKS, SIDES, RATES, SEEDS
    if given.quick:
        links, sides, rates, seeds = LINKS[-1:], QUICK, RATES[2:3], SEEDS[:1]
    results = [best(side, link, rates, seeds) for link in links for side in sides]
    print(table(results))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
