"""Mutable working copy of a frozen state.

While a state machine handles one event, several rules change the state in turn, and each has to see the changes of the
rule before it. A draft holds them: ``decide`` makes it from the state, the event's handler changes it and adds
instructions, and `result` freezes it into the next state. A draft never outlives its event.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

State = TypeVar("State")
Instruction = TypeVar("Instruction")


class Draft(Generic[State, Instruction]):
    """A state under change at time `now`, and the instructions that follow from the event."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.instructions: list[Instruction] = []

    def set(self, **changes: object) -> None:
        """Replace fields of the state."""
        self.state = replace(self.state, **changes)  # type: ignore[type-var]

    def instruct(self, instruction: Instruction) -> None:
        """Add an instruction for the shell to carry out once the event is journaled."""
        self.instructions.append(instruction)

    def freeze(self) -> State:
        """Return the next state; drafts that copied collections out of the state put them back here."""
        return self.state

    def result(self) -> tuple[State, tuple[Instruction, ...]]:
        """Return the next state and the instructions, in the order in which they were added."""
        return self.freeze(), tuple(self.instructions)
