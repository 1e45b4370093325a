"""When to look at the gradients, and what the pulses say of their noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.step_report import StepReport
from shoal.worker.training.step import Step


class NoiseSampler:
    """The noise of a run's gradients; norms are taken `every` so many steps, 0 for never."""

    def __init__(self, every: int) -> None:
        self.noise = GradientNoise()
        self.every = every

    def due(self, turn: Step) -> bool:
        """Whether to take the norms of this step: it is time, and there are two groups of samples to compare."""
        if not self.every or turn.step % self.every or turn.first or turn.held is not None:
            return False
        return turn.world.size > 1 or len(turn.pieces) > 1

    def told(self, last: Step | None, turn: Step) -> dict[str, Any]:
        """For the pulse: what was found in the step before, if the same members took part in it."""
        if last is None or last.squares is None or not last.committed or last.world != turn.world:
            return {}
        grad_sq, groups = last.squares.weighted(last.weight, last.nominal)
        return {"grad_sq": grad_sq, "grad_weight": last.weight, "groups": groups, "total_sq": last.squares.total}

    def learn(self, everybody: Sequence[StepReport]) -> None:
        """Take in what the pulses of a committed step tell."""
        told = [p for p in everybody if p.groups]
        if told:
            size = sum(p.grad_weight for p in told)
            # Weights may be tokens; the noise scale is in samples.
            samples, weight = sum(p.samples for p in everybody), sum(p.weight for p in everybody)
            in_samples = None if samples == weight or not weight else size * samples / weight
            groups = sum(p.groups for p in told)
            self.noise.observe_sums(sum(p.grad_sq for p in told), size, groups, told[0].total_sq, in_samples)


def is_halfway(turn: Step) -> bool:
    """Whether half of the pieces of the whole batch are computed, here: alone, its halves are the groups to compare."""
    return turn.samples == turn.nominal and turn.backwards == len(turn.pieces) // 2
