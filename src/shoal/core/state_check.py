"""Check of the state: when the members of a world compare what they trained, and what a difference means.

*The problem.* After a commit all members hold the same parameters and the same optimizer state: each applies the same
summed gradient to the same values. A script can break that without an error: an optimizer that is not attached, noise
added to gradients, weights edited with values of a member's own. The members then train different models, and the file
that is saved at the end is one of them.

*The check.* Before a step is computed every member hashes its tensors, and its step report carries one checksum. All
members read the same reports, so all see a difference in the same step, before that step is applied. Only then do they
gather one row of details (a hash and a few values of each tensor), which names the tensor.

*When.* In the first step of a world in which no rank catches up, and then after 1, 2, 4, … steps, until the gap is so
long that the check costs at most `MAX_COST` of the training. The gap must be the same on all members, so it is derived
from the reports: each carries how long its member took to hash, and the times of the step before. A new world starts
over: its members know nothing else in common. After the last step the states are compared once more.

*What a difference means.* On machines of one kind the same operations give the same bits, so any difference in a
parameter or in the optimizer's state is an error. Machines of different kinds may round differently: there the values
are compared, and a difference below `SAME` is reported once and tolerated. Buffers that a forward pass changes from the
samples of a share alone differ legitimately; a difference is reported, not refused.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.core.step_report import StepReport

MAX_COST = 0.005
MIN_GAP, MAX_GAP = 8, 1000
PROBES = 8
# Relative to the largest of a tensor's compared values.
SAME = 1e-3
COLUMNS = 1024
# Columns of a row of details: one hash and the probes for each tensor.
WIDTH = 1 + PROBES

Kind: TypeAlias = Literal["parameter", "buffer", "optimizer"]
Severity: TypeAlias = Literal["diverged", "rounding", "buffer"]


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Hash of one tensor and some of its values; `hint` says what else is known about why it might differ."""

    name: str
    kind: Kind
    hash: int
    probes: tuple[float, ...]
    hint: str = ""


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Digests of all tensors of one member's state at the start of a step, in the same order on all members."""

    tensors: tuple[TensorDigest, ...]
    seconds: float = 0.0

    def plus(self, tensor: TensorDigest) -> StateDigest:
        """Return this digest with one more entry."""
        return StateDigest((*self.tensors, tensor), self.seconds)

    @property
    def checksum(self) -> int:
        """A number of 52 bits that stands for the whole state, never 0."""
        packed = struct.pack(f"<{len(self.tensors)}I", *(tensor.hash for tensor in self.tensors))
        return 1 + (int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 12)

    @property
    def names_hash(self) -> int:
        """A hash of the names up to a comma, which tells whether details of two members can be compared."""
        return zlib.crc32("\n".join(tensor.name.partition(",")[0] for tensor in self.tensors).encode())

    def rows(self) -> NDArray[np.float64]:
        """Return the details that members gather when their checksums differ, as one flat row."""
        rows = np.zeros((len(self.tensors), WIDTH))
        for row, tensor in zip(rows, self.tensors, strict=True):
            row[0] = tensor.hash
            row[1 : 1 + len(tensor.probes)] = tensor.probes
        return rows.reshape(-1)


@dataclass(frozen=True, slots=True)
class StateDifference:
    """The first tensor in which members differ, how many do, and how serious it is."""

    severity: Severity
    tensor: TensorDigest
    differing: int
    values: tuple[float, ...]


class CheckSchedule:
    """Decides in which steps a state is checked; the same on all members of a world, which see the same reports."""

    def __init__(self) -> None:
        self._world = 0
        self._next: int | None = None
        self._gap = 1
        self.agreed: int | None = None

    def due(self, step: int, world: int) -> bool:
        """Return whether to compare the states before this step; call it only if no rank catches up."""
        if world != self._world:
            self._world, self._next, self._gap, self.agreed = world, step, 1, None
        return self._next is None or step >= self._next

    def observe(self, step: int, reports: Sequence[StepReport]) -> bool:
        """Learn from the reports of a step; return whether they show that states differ.

        Nothing is concluded from a step in which some member sent no checksum.
        """
        sums = {report.checksum for report in reports}
        if len(reports) < 2 or 0 in sums:
            return False
        self._next = step + self._gap
        self._gap = min(2 * self._gap, affordable_gap(reports))
        if len(sums) == 1:
            self.agreed = step
        return len(sums) > 1


def affordable_gap(reports: Sequence[StepReport]) -> int:
    """Return after how many steps to check again, so that checks cost at most `MAX_COST` of the training."""
    check_s = max(report.checksum_s for report in reports)
    step_s = max(report.data_s + report.compute_s + report.wait_s for report in reports)
    return min(max(ceil(check_s / (MAX_COST * step_s)), MIN_GAP), MAX_GAP) if step_s > 0 else MAX_GAP


def digest(raw: NDArray[np.uint8]) -> int:
    """Return a hash of 32 bits of a tensor's bytes, at the speed of memory for large ones.

    The bytes are words in rows of `COLUMNS`; the columns are summed and the sums hashed. It tells accidents apart, not
    attacks: members that want to lie about their state can do so anyway.
    """
    whole = raw.size // (8 * COLUMNS) * (8 * COLUMNS)
    sums = np.add.reduce(raw[:whole].view(np.uint64).reshape(-1, COLUMNS), axis=0)
    return zlib.crc32(raw[whole:].tobytes(), zlib.crc32(sums.tobytes(), raw.size & 0xFFFF_FFFF))


def difference(
    digest: StateDigest, rows: NDArray[np.float64], platforms: Sequence[float] | NDArray[np.float64]
) -> StateDifference | None:
    """Return the most serious difference between the gathered details of all ranks; None if there is none.

    `platforms` are numbers that are equal for ranks on machines of one kind.
    """
    details = rows.reshape(len(rows), len(digest.tensors), WIDTH)
    differing = np.flatnonzero((details[:, :, 0] != details[0, :, 0]).any(axis=0))
    if not differing.size:
        return None
    one_kind = len(set(platforms)) == 1

    def of(severity: Severity, index: int) -> StateDifference:
        probes = details[:, index, 1:]
        column = int(np.argmax(_spread(probes)))
        return StateDifference(severity, digest.tensors[index], differing.size, tuple(probes[:, column].tolist()))

    trained = [index for index in differing.tolist() if digest.tensors[index].kind != "buffer"]
    for index in trained:
        if one_kind or not _nearly_equal(details[:, index, 1:]):
            return of("diverged", index)
    return of("rounding", trained[0]) if trained else of("buffer", int(differing[0]))


def majority(checksums: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks of the largest group with one checksum; of equal groups, the one with the lowest rank."""
    groups: dict[float, list[int]] = {}
    for rank, checksum in enumerate(checksums):
        groups.setdefault(checksum, []).append(rank)
    largest = max(len(ranks) for ranks in groups.values())
    return tuple(next(ranks for ranks in groups.values() if len(ranks) == largest))


def _spread(probes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how much the ranks differ in each probe; infinite where some are not numbers."""
    with np.errstate(invalid="ignore"):
        spread = probes.max(axis=0) - probes.min(axis=0)
    alike = ((probes == probes[0]) | (np.isnan(probes) & np.isnan(probes[0]))).all(axis=0)
    result: NDArray[np.float64] = np.where(alike, 0.0, np.where(np.isfinite(spread), spread, np.inf))
    return result


def _nearly_equal(probes: NDArray[np.float64]) -> bool:
    finite = np.where(np.isfinite(probes), probes, 0.0)
    return bool(_spread(probes).max(initial=0.0) <= SAME * np.abs(finite).max(initial=0.0))
