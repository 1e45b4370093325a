"""Interface of the collective operations of one world, whatever carries the bytes."""

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
"""Called once, from the exchange's own thread, when the world breaks: with the suspects and the cause."""


def plain_add(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Add `source` to `target` in place; the Adder of all types that NumPy can add."""
    np.add(target, source, target)


@dataclass(frozen=True, slots=True)
class TreePartials:
    """One member's contribution to a sum over shards: which shards, and their tree nodes, each as long as the sum.

    The operation overwrites the nodes. The first one may be the very buffer that the sum is written to.
    """

    shard_range: ShardRange = NO_SHARDS
    nodes: Sequence[NDArray[Any]] = ()

    def check(self, flat: NDArray[Any]) -> None:
        """Raise ValueError if the nodes cannot be those of these shards."""
        expected = len(nodes(self.shard_range))
        if len(self.nodes) != expected:
            raise ValueError(f"{self.shard_range} has {expected} nodes, but {len(self.nodes)} were given")
        if any(n.shape != flat.shape or n.dtype != flat.dtype or not n.flags.c_contiguous for n in self.nodes):
            raise ValueError("every node must be contiguous, and of the shape and type of the sum")


class Work(Protocol):
    """An operation that is under way."""

    def wait(self) -> None:
        """Return when the operation is complete; raise ExchangeBroken if it never will be."""


class GatherWork(Work, Protocol):
    """A gather that is under way."""

    def result(self) -> NDArray[np.float64]:
        """Wait, then return the records of all ranks, one row per rank."""


class Exchange(Protocol):
    """Collective operations of one world; every rank calls the same ones in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, record: NDArray[np.float64]) -> GatherWork:
        """Send one small record to all ranks and receive theirs."""

    def reduce(self, buffer: NDArray[Any], add: Adder | None = None, part: TreePartials | None = None) -> Work:
        """Sum a buffer over all ranks in place, bitwise equal on all; do not touch it until the work is done.

        With `part`, which all ranks then pass, the result is the sum of the shards that they hold between them: its
        bits do not depend on which rank holds which shards, and the previous content of the buffer does not count.
        """

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def abort(self, cause: str) -> None:
        """Fail every operation, pending and future, at once; may be called from any thread, any number of times."""

    def close(self) -> None:
        """Release threads and connections."""
