"""How the members of one world sum gradients and share pulses, whoever carries the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.shares.reduction_tree import NO_SHARDS, ShardRange, nodes

Adder = Callable[[NDArray[Any], NDArray[Any]], object]
"""Adds its second argument to its first, in place; for types that NumPy cannot add."""

OnBreak = Callable[[tuple[str, ...], str], object]
"""Told once, from the exchange's own thread, that the world fell apart: the suspects and the cause."""


def plain_add(target: NDArray[Any], source: NDArray[Any]) -> None:
    """The Adder of all types that NumPy can add."""
    np.add(target, source, target)


@dataclass(frozen=True, slots=True)
class TreePartials:
    """What one member has of a sum over shards: which ones, and their nodes, each as long as the sum.

    The nodes are used up; the first may be the very buffer that the sum is written to.
    """

    held: ShardRange = NO_SHARDS
    nodes: Sequence[NDArray[Any]] = ()

    def check(self, flat: NDArray[Any]) -> None:
        """Raise if the nodes cannot be those of these shards."""
        if len(self.nodes) != len(nodes(self.held)):
            raise ValueError(f"{self.held} has {len(nodes(self.held))} nodes, but {len(self.nodes)} were given")
        if any(n.shape != flat.shape or n.dtype != flat.dtype or not n.flags.c_contiguous for n in self.nodes):
            raise ValueError("every node must be contiguous, and of the shape and type of the sum")


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the operation is complete; raise ExchangeBroken if it never will be."""


class GatherWork(Work, Protocol):
    """A gather under way."""

    def result(self) -> NDArray[np.float64]:
        """Wait, then return the records of all ranks, one row a rank."""


class Exchange(Protocol):
    """Collective operations of one world; every rank calls the same ones in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, record: NDArray[np.float64]) -> GatherWork:
        """Send one small record to all and receive everybody's."""

    def reduce(self, buffer: NDArray[Any], add: Adder | None = None, part: TreePartials | None = None) -> Work:
        """Sum a buffer over all ranks in place, bitwise equal on all; leave it alone until the ticket is done.

        With `part`, which all ranks then pass, the sum is that of the shards that they hold between them: its bits
        do not depend on who holds which, and what was in the buffer does not count.
        """

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def abort(self, cause: str) -> None:
        """Fail every operation, pending and future, at once; callable from any thread, any number of times."""

    def close(self) -> None:
        """Let go of threads and connections."""
