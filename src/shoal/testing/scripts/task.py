"""The task of the conformance suite: what every framework's script trains, and what it records of it.

Two dense layers with tanh between them, in float64, with a squared loss and momentum. The first column of `x` is the
number of the sample, which the model does not see. In plain NumPy the same training is a few lines: `Task.trajectory`
is what all frameworks are compared with.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.core.data.sample_order import SampleOrder
from shoal.testing.scripts import hold

Floats: TypeAlias = NDArray[np.float64]

RECORDS = "RECORDS"
TASK = "SHOAL_TASK"


@dataclass(frozen=True)
class TrainingTask:
    """How much there is to train. While its test holds a run back, every step is followed by a pause."""

    samples: int = 200
    batch: int = 32
    epochs: int = 10
    seed: int = 5
    features: int = 3
    width: int = 4
    rate: float = 0.0625
    momentum: float = 0.875
    decay: float = 1.0
    pause_s: float = 0.03

    @classmethod
    def read(cls) -> TrainingTask:
        """As the test put it into the environment."""
        return cls(**json.loads(os.environ.get(TASK, "{}")))

    def told(self) -> dict[str, str]:
        """What a test puts into the environment."""
        return {TASK: json.dumps(asdict(self))}

    @property
    def order(self) -> SampleOrder:
        return SampleOrder(self.samples, self.batch, self.epochs, self.seed)

    def data(self) -> tuple[Floats, Floats]:
        """All samples: `x`, whose first column is their number, and `y`."""
        x = np.random.default_rng(1).normal(size=(self.samples, self.features))
        return np.hstack([np.arange(self.samples)[:, None], x]), np.sin(x.sum(1, keepdims=True))

    def start(self) -> list[Floats]:
        """The parameters that training begins with: kernel and bias of each layer; a kernel is inputs by outputs."""
        dice = np.random.default_rng(2)
        shapes = [(self.features, self.width), (self.width,), (self.width, 1), (1,)]
        return [0.5 * dice.normal(size=shape) for shape in shapes]

    def trajectory(self, steps: int) -> list[Floats]:
        """The parameters after each of the first steps of one undisturbed process, flat."""
        (x, y), order = self.data(), self.order
        parameters = self.start()
        speeds = [np.zeros_like(one) for one in parameters]
        found = []
        for step in range(steps):
            ids = order.ids(step, 0, order.size_of(step))
            gradients = gradients_of(parameters, x[ids, 1:], y[ids])
            rate = self.rate * self.decay ** order.cursor(step).epoch
            for one, speed, gradient in zip(parameters, speeds, gradients, strict=True):
                speed *= self.momentum
                speed -= rate * gradient
                one += speed
            found.append(flat(parameters))
        return found

    def losses(self, trajectory: Sequence[Floats]) -> list[float]:
        """The mean loss of each whole epoch, every batch of it before its step; as Keras shows it."""
        (x, y), order = self.data(), self.order
        before = [flat(self.start()), *trajectory]
        totals: dict[int, float] = {}
        for step in range(len(trajectory)):
            ids = order.ids(step, 0, order.size_of(step))
            off = outputs_of(self._shaped(before[step]), x[ids, 1:]) - y[ids]
            epoch = order.cursor(step).epoch
            totals[epoch] = totals.get(epoch, 0.0) + float((off**2).sum())
        return [total / self.samples for total in list(totals.values())[: len(trajectory) // order.steps_per_epoch]]

    def _shaped(self, parameters: Floats) -> list[Floats]:
        shapes = [one.shape for one in self.start()]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return [one.reshape(shape) for one, shape in zip(np.split(parameters, ends), shapes, strict=True)]


class RunRecord:
    """What one member writes down; a line is on disk before the next thing happens."""

    def __init__(self, task: TrainingTask, member: str) -> None:
        self._task, self._member = task, member
        self._place = Path(os.environ[RECORDS])
        life = os.environ.get("SHOAL_INCARNATION", "alone")
        self._file = (self._place / f"{member.replace('/', '-')}.{life}.jsonl").open("a", buffering=1)
        self._given, self._last, self._busy = (-1, 0), -1, False

    def ready(self) -> None:
        """The model is built, and training is about to begin."""
        self.write("ready")

    def given(self, step: int, world: int, ids: Sequence[float]) -> None:
        """A forward pass over these samples of a step; none, if this member has no share of it."""
        self._given, self._busy = (step, world), len(ids) > 0
        self.write("given", step=step, world=world, ids=[int(one) for one in ids])

    def commit(self, step: int, world: int, size: int, parameters: Sequence[Any]) -> None:
        """A step was committed, in a world of this size; kernels are inputs by outputs.

        One that was received from others, done, is not recorded.
        """
        if step == self._last or (step, world) != self._given:
            return
        self._last = step
        self.write("commit", step=step, world=world, size=size, parameters=flat(parameters).tolist())
        # A newcomer that has no share yet is still catching up with the others.
        if self._busy and hold.is_held(self._place):
            time.sleep(self._task.pause_s)
            hold.tarry(self._place, step, self._task.order.total_steps)

    def done(self, step: int, parameters: Sequence[Any], **more: Any) -> None:
        """Training is over, after so many steps."""
        self.write("done", step=step, parameters=flat(parameters).tolist(), **more)

    def write(self, event: str, **fields: Any) -> None:
        base = {"event": event, "member": self._member, "pid": os.getpid(), "at": time.time()}
        self._file.write(json.dumps(base | fields) + "\n")


def flat(parameters: Sequence[Any]) -> Floats:
    """All parameters in one row."""
    return np.concatenate([np.asarray(one, np.float64).reshape(-1) for one in parameters])


def outputs_of(parameters: Sequence[Floats], x: Floats) -> Floats:
    """What the model says of these samples."""
    first, bias, second, last = parameters
    found: Floats = np.tanh(x @ first + bias) @ second + last
    return found


def gradients_of(parameters: Sequence[Floats], x: Floats, y: Floats) -> list[Floats]:
    """Those of the mean squared loss over these samples."""
    first, bias, second, last = parameters
    hidden = np.tanh(x @ first + bias)
    off = 2 * (hidden @ second + last - y) / len(x)
    inside = (off @ second.T) * (1 - hidden**2)
    return [x.T @ inside, inside.sum(0), hidden.T @ off, off.sum(0)]
