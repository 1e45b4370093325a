"""Step report: the record that every member adds to the exchange of each step, gathered as one row for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

# Relative tolerance: machines may differ in the last digits of a cosine.
SAME_RATE = 1e-6
STOP = 1
CATCHING_UP = 2


@dataclass(frozen=True, slots=True)
class StepReport:
    """One member's report of one step.

    `samples` is its true share, `weight` what its gradient counts for, `loss` its mean loss. The times `data_s`,
    `compute_s` and `wait_s` are those of the step before, in which it was given `measured` units of the split (0 if
    nothing was measured), in micro-batches of at most `micro` samples (0 if not cut).

    If gradient norms were taken in that step, `total_sq` is the squared norm of the whole batch's gradient, and
    `grad_sq` is the sum, over the member's `groups` of samples with `grad_weight` in all, of weight times squared norm
    of the group's mean gradient. Otherwise these are 0.

    `prepared` is the number of the proposed world that the member has connected, 0 for none. `flags` is a set of bits:
    STOP asks for the end of the training after this step, CATCHING_UP says that it has no share of the next step
    either. `more` says whether its stream has another sample. `rate` is the sum of its learning rates, 0 if they may
    differ from those of other members. `checksum` stands for its state before this step (see `core.state_check`) and
    took `checksum_s` to compute; it is 0 in most steps, in which states are not compared.
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
    checksum: int = 0
    checksum_s: float = 0.0


WIDTH = len(fields(StepReport))


def encode(report: StepReport) -> NDArray[np.float64]:
    """Return the report as one row; integers are exact up to 2⁵³."""
    return np.array([getattr(report, field.name) for field in fields(StepReport)], dtype=np.float64)


def decode(matrix: NDArray[np.float64]) -> tuple[StepReport, ...]:
    """Return the reports of all ranks from the gathered rows; raise ValueError if the rows have another width."""
    if matrix.ndim != 2 or matrix.shape[1] != WIDTH:
        raise ValueError(f"step reports of shape {matrix.shape}, expected rows of {WIDTH}")
    return tuple(_report(row) for row in matrix.tolist())


def _report(row: Sequence[float]) -> StepReport:
    step, samples, weight, loss, compute_s, data_s, wait_s, measured, micro, *rest = row
    grad_sq, grad_weight, groups, total_sq, prepared, flags, more, rate, checksum, checksum_s = rest
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
        checksum=int(checksum),
        checksum_s=checksum_s,
    )


def agreed_world(reports: Sequence[StepReport]) -> int | None:
    """Return the number of the world that all members have prepared; None if they have not, or not the same."""
    numbers = {report.prepared for report in reports}
    return numbers.pop() or None if len(numbers) == 1 else None


def step_mismatch(reports: Sequence[StepReport]) -> str:
    """Return why these reports cannot belong to one step, "" if they can. Members that catch up fit any step."""
    if len({report.step for report in reports if report.step >= 0}) <= 1:
        return ""
    steps = ", ".join(f"rank {rank} is at step {report.step}" for rank, report in enumerate(reports))
    return f"the members are not at the same step: {steps}"


def learning_rate_mismatch(reports: Sequence[StepReport]) -> str:
    """Return how the members' learning rates differ, "" if they do not."""
    rates = [report.rate for report in reports if report.rate]
    if not rates or max(rates) - min(rates) <= SAME_RATE * max(rates):
        return ""
    return ", ".join(f"{report.rate:g} at rank {rank}" for rank, report in enumerate(reports) if report.rate)
