"""Schedule of checkpoints, by time and by steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointSchedule:
    """A checkpoint every `every_s` seconds, every `every_steps` steps, or both; 0 disables a rule."""

    every_s: float = 0.0
    every_steps: int = 0

    def due(self, step: int, now: float, last_step: int, last_time: float) -> bool:
        """Return whether to write one after `step`, given the step and time of the last one (or of the start)."""
        if step <= last_step:
            return False
        by_time = self.every_s > 0 and now - last_time >= self.every_s
        by_steps = self.every_steps > 0 and step - last_step >= self.every_steps
        return by_time or by_steps
