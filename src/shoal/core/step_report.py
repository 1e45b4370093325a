"""The pulse: the small vector that every member adds to each step's exchange, one row for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

# Machines may differ in the last digits of a cosine.
SAME_RATE = 1e-6
STOP = 1
CATCHING_UP = 2


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one member says in one step.

    `samples` is its true share and `weight` what its gradient counts for. `data_s`, `compute_s` and `wait_s` tell of
    the step before, in which it was dealt `measured` units of the plan (0: nothing was measured), cut into pieces of
    `micro` at most (0: not cut). If norms were taken then, `total_sq` is the squared norm of the whole batch's
    gradient, and `grad_sq` the sum over its own `groups` of samples, of `grad_weight` together, of weight times squared
    norm of the group's mean gradient; if not, all are 0. `prepared` is the number of the proposed world that it has
    connected, 0 for none; `flags` is a set of the bits STOP and CATCHING_UP (it has no share of the next step either);
    `more` says whether its stream has another sample after this step. `rate` is the sum of its learning rates, 0 if
    they need not be those of the others.
    """

    step: int
    samples: int = 0
    weight: float = 0.0
    loss: float = 0.0
    compute_s: float = 0.0
    data_s: float = 0.0
    wait_s: float = 0.0
    measured: int = 0
    micro: int = 0
    grad_sq: float = 0.0
    grad_weight: float = 0.0
    groups: int = 0
    total_sq: float = 0.0
    prepared: int = 0
    flags: int = 0
    more: bool = True
    rate: float = 0.0


WIDTH = len(fields(StepReport))


def encode(pulse: StepReport) -> NDArray[np.float64]:
    """The pulse as one row; whole numbers are exact up to 2⁵³."""
    return np.array([getattr(pulse, field.name) for field in fields(StepReport)], dtype=np.float64)


def decode(matrix: NDArray[np.float64]) -> tuple[StepReport, ...]:
    """The pulses of all ranks from the gathered rows."""
    if matrix.ndim != 2 or matrix.shape[1] != WIDTH:
        raise ValueError(f"pulses of shape {matrix.shape}, expected rows of {WIDTH}")
    return tuple(_pulse(row) for row in matrix.tolist())


def _pulse(row: Sequence[float]) -> StepReport:
    step, samples, weight, loss, compute_s, data_s, wait_s, measured, micro, *rest = row
    grad_sq, grad_weight, groups, total_sq, prepared, flags, more, rate = rest
    return StepReport(
        step=int(step),
        samples=int(samples),
        weight=weight,
        loss=loss,
        compute_s=compute_s,
        data_s=data_s,
        wait_s=wait_s,
        measured=int(measured),
        micro=int(micro),
        grad_sq=grad_sq,
        grad_weight=grad_weight,
        groups=int(groups),
        total_sq=total_sq,
        prepared=int(prepared),
        flags=int(flags),
        more=bool(more),
        rate=rate,
    )


def agreed_world(pulses: Sequence[StepReport]) -> int | None:
    """The number of the world that every member has prepared, if they all have prepared the same."""
    numbers = {pulse.prepared for pulse in pulses}
    return numbers.pop() or None if len(numbers) == 1 else None


def step_mismatch(pulses: Sequence[StepReport]) -> str:
    """Why these pulses cannot belong to one step; empty if they can. A newcomer's shadow fits any step."""
    if len({pulse.step for pulse in pulses if pulse.step >= 0}) <= 1:
        return ""
    said = ", ".join(f"rank {rank} is at step {pulse.step}" for rank, pulse in enumerate(pulses))
    return f"the members are not at the same step: {said}"


def learning_rate_mismatch(pulses: Sequence[StepReport]) -> str:
    """How the members' learning rates differ; empty if they do not."""
    rates = [pulse.rate for pulse in pulses if pulse.rate]
    if not rates or max(rates) - min(rates) <= SAME_RATE * max(rates):
        return ""
    return ", ".join(f"{pulse.rate:g} at rank {rank}" for rank, pulse in enumerate(pulses) if pulse.rate)
