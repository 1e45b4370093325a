"""Sampling of gradient norms, from which the gradient noise scale is estimated.

The noise scale compares the gradient norms of small groups of samples with the norm of the whole batch. With several
members, each member's share is a group; a member on its own compares the two halves of its micro-batches. Norms of step
k travel in the step reports of step k + 1, so they cost no message of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.step_report import StepReport
from shoal.worker.training.step import Step


class NoiseSampler:
    """Decides in which steps to measure gradient norms; 0 for `every_steps` disables it."""

    def __init__(self, every_steps: int) -> None:
        self.noise = GradientNoise()
        self.every_steps = every_steps

    def due(self, current: Step) -> bool:
        """Return whether to measure this step: its number is due and it has at least two groups to compare."""
        if (
            not self.every_steps
            or current.number % self.every_steps
            or current.first
            or current.shard_range is not None
        ):
            return False
        return current.world.size > 1 or len(current.micro_batches) > 1

    def report_fields(self, previous: Step | None, current: Step) -> dict[str, Any]:
        """Return the norms of the previous step as fields of a report, empty if the members have changed since."""
        if (
            previous is None
            or previous.gradient_norms is None
            or not previous.committed
            or previous.world != current.world
        ):
            return {}
        norms = previous.gradient_norms
        grad_sq, groups = norms.weighted(previous.weight, previous.global_batch_size)
        return {"grad_sq": grad_sq, "grad_weight": previous.weight, "groups": groups, "total_sq": norms.total}

    def observe(self, reports: Sequence[StepReport]) -> None:
        """Add the norms that the reports of a committed step carry to the estimate."""
        measured = [report for report in reports if report.groups]
        if measured:
            size = sum(report.grad_weight for report in measured)
            # Weights may be tokens; the noise scale is in samples.
            samples = sum(report.samples for report in reports)
            weight = sum(report.weight for report in reports)
            in_samples = None if samples == weight or not weight else size * samples / weight
            groups = sum(report.groups for report in measured)
            grad_sq = sum(report.grad_sq for report in measured)
            self.noise.observe_sums(grad_sq, size, groups, measured[0].total_sq, in_samples)


def is_halfway(current: Step) -> bool:
    """Return whether this member, which computes the whole batch, has done half of its micro-batches."""
    whole_batch = current.samples == current.global_batch_size
    return whole_batch and current.backwards == len(current.micro_batches) // 2
