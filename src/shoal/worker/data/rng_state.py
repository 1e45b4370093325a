"""The global random generators that a dataset may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class RngState:
    """State of the global generators of Python and NumPy; a framework's subclass adds its own."""

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    def state(self) -> tuple[Any, ...]:
        """Return the states, for `restore` and `same`."""
        return random.getstate(), np.random.get_state()

    def restore(self, state: tuple[Any, ...]) -> None:
        """Set the states that `state` returned."""
        random.setstate(state[0])
        np.random.set_state(state[1])

    def same(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
        """Return whether nothing was drawn between two states."""
        return before[0] == after[0] and all(np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the states at the end of the block."""
        before = self.state()
        try:
            yield
        finally:
            self.restore(before)
