"""Task of the conformance suite: what every framework's script trains, and what it records.

Two dense layers with tanh between them, in float64, with a squared loss and momentum. The first column of `x` is the
number of the sample, which the model does not see. In plain NumPy the same training takes a few lines:
`TrainingTask.trajectory` is what all frameworks are compared with.
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
    """Size and hyperparameters of the training. While the test holds the run, every step is followed by `pause_s`."""

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
        """Return the task that the test has put into the environment."""
        return cls(**json.loads(os.environ.get(TASK, "{}")))

    def environ(self) -> dict[str, str]:
        """Return the environment variables for a script that trains this task."""
        return {TASK: json.dumps(asdict(self))}

    @property
    def order(self) -> SampleOrder:
        return SampleOrder(self.samples, self.batch, self.epochs, self.seed)

    def data(self) -> tuple[Floats, Floats]:
        """Return all samples: `x`, whose first column is their number, and `y`."""
        x = np.random.default_rng(1).normal(size=(self.samples, self.features))
        return np.hstack([np.arange(self.samples)[:, None], x]), np.sin(x.sum(1, keepdims=True))

    def start(self) -> list[Floats]:
        """Return the initial parameters: kernel (inputs by outputs) and bias of each layer."""
        dice = np.random.default_rng(2)
        shapes = [(self.features, self.width), (self.width,), (self.width, 1), (1,)]
        return [0.5 * dice.normal(size=shape) for shape in shapes]

    def trajectory(self, steps: int) -> list[Floats]:
        """Return the flat parameters after each of the first steps of one undisturbed process."""
        (x, y), order = self.data(), self.order
        parameters = self.start()
        velocities = [np.zeros_like(parameter) for parameter in parameters]
        trajectory = []
        for step in range(steps):
            ids = order.ids(step, 0, order.size_of(step))
            gradients = gradients_of(parameters, x[ids, 1:], y[ids])
            rate = self.rate * self.decay ** order.cursor(step).epoch
            for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                velocity *= self.momentum
                velocity -= rate * gradient
                parameter += velocity
            trajectory.append(flat(parameters))
        return trajectory

    def losses(self, trajectory: Sequence[Floats]) -> list[float]:
        """Return the mean loss of each whole epoch, each batch before its step, as Keras shows it."""
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
        shapes = [parameter.shape for parameter in self.start()]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return [flat_part.reshape(shape) for flat_part, shape in zip(np.split(parameters, ends), shapes, strict=True)]


class RunRecord:
    """Records of one member, as JSON lines; each line is on disk before the script continues."""

    def __init__(self, task: TrainingTask, member: str) -> None:
        self._task, self._member = task, member
        self._directory = Path(os.environ[RECORDS])
        incarnation = os.environ.get("SHOAL_INCARNATION", "alone")
        self._file = (self._directory / f"{member.replace('/', '-')}.{incarnation}.jsonl").open("a", buffering=1)
        self._given, self._last, self._busy = (-1, 0), -1, False

    def ready(self) -> None:
        """Record that the model is built and training is about to begin."""
        self.write("ready")

    def given(self, step: int, world: int, ids: Sequence[float]) -> None:
        """Record a forward pass over these samples of a step; none if this member has no share of it."""
        self._given, self._busy = (step, world), len(ids) > 0
        self.write("given", step=step, world=world, ids=[int(sample) for sample in ids])

    def commit(self, step: int, world: int, size: int, parameters: Sequence[Any]) -> None:
        """Record a committed step in a world of this size; kernels are inputs by outputs.

        A step that this member did not compute, but received with the state of a peer, is not recorded.
        """
        if step == self._last or (step, world) != self._given:
            return
        self._last = step
        self.write("commit", step=step, world=world, size=size, parameters=flat(parameters).tolist())
        # A newcomer without a share is still catching up and must not be slowed down.
        if self._busy and hold.is_held(self._directory):
            time.sleep(self._task.pause_s)
            hold.pause_while_held(self._directory, step, self._task.order.total_steps)

    def done(self, step: int, parameters: Sequence[Any], **more: Any) -> None:
        """Record the end of training after `step` steps."""
        self.write("done", step=step, parameters=flat(parameters).tolist(), **more)

    def write(self, event: str, **fields: Any) -> None:
        base = {"event": event, "member": self._member, "pid": os.getpid(), "at": time.time()}
        self._file.write(json.dumps(base | fields) + "\n")


def flat(parameters: Sequence[Any]) -> Floats:
    """Return all parameters as one vector."""
    return np.concatenate([np.asarray(parameter, np.float64).reshape(-1) for parameter in parameters])


def outputs_of(parameters: Sequence[Floats], x: Floats) -> Floats:
    """Return the model's outputs for these samples."""
    first, bias, second, last = parameters
    outputs: Floats = np.tanh(x @ first + bias) @ second + last
    return outputs


def gradients_of(parameters: Sequence[Floats], x: Floats, y: Floats) -> list[Floats]:
    """Return the gradients of the mean squared loss over these samples."""
    first, bias, second, last = parameters
    hidden = np.tanh(x @ first + bias)
    off = 2 * (hidden @ second + last - y) / len(x)
    inside = (off @ second.T) * (1 - hidden**2)
    return [x.T @ inside, inside.sum(0), hidden.T @ off, off.sum(0)]
