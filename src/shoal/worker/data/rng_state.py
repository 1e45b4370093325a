"""The global random generators that a dataset may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class RngState:
    """Those of Python and NumPy; a framework adds its own."""

    def seed(self, seed: int) -> None:
        """Let all of them start anew."""
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    def state(self) -> tuple[Any, ...]:
        """What `restore` takes and `same` compares."""
        return random.getstate(), np.random.get_state()

    def restore(self, state: tuple[Any, ...]) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])

    def same(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        """Whether nothing was drawn between two states."""
        return one[0] == other[0] and all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Leave them as they were."""
        before = self.state()
        try:
            yield
        finally:
            self.restore(before)
