"""Comparison of the members' states: hashes the tensors when that is due, and acts on a difference.

`core.state_check` has the theory: what is compared, when, and what a difference means. This module does the work
around it. `digest` is called at the start of a step, while the state is exactly that of the last commit; `compare` is
called after the exchange of the same step and before its commit. All ranks call `compare` with the same reports, so
either all or none of them gather details, which may not overlap with the other operations of the step. No report
carries the state after the last step, so `compare_at_end` gathers the checksums of that one by itself.

On a difference the run stops with StateDiverged. With ``on_divergence=repair`` the ranks outside the majority drop
their state instead and the world is broken: in the next world they receive the state as newcomers do. A cause that
persists makes them diverge again; after `MAX_REPAIRS` times a member stops all the same.
"""

from __future__ import annotations

import platform
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from shoal.core import state_check
from shoal.core.nouns import plural
from shoal.core.state_check import CheckSchedule, StateDifference, StateDigest, TensorDigest
from shoal.core.world import World
from shoal.errors import ShoalError, StateDiverged, StateDrifts
from shoal.settings import RunSettings
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.training.step import Step
from shoal.worker.transport.exchange_broken import ExchangeBroken

MAX_REPAIRS = 3
CAUSES = (
    "gradients were changed after run.backward, an optimizer is not attached, or the script edits the model with "
    "values of a member's own"
)


class CheckedSession(Protocol):
    """The part of a session that the check needs."""

    @property
    def rank(self) -> int: ...

    @property
    def settings(self) -> RunSettings: ...

    def forget_state(self) -> None:
        """Drop the state, so that the next world brings that of another member."""


class _Moment(NamedTuple):
    """When states are compared, by whom, and before which step they last agreed."""

    when: str
    world: World
    exchange: Exchange
    agreed: int | None


class StateCheck:
    """Compares this member's state with that of the others.

    `tensors` returns the digests of all tensors, `arithmetic` a text that is equal where the framework gives equal bits
    on equal processors: its version, devices and threads.
    """

    def __init__(
        self, session: CheckedSession, tensors: Callable[[], Iterable[TensorDigest]], arithmetic: Callable[[], str]
    ) -> None:
        self._session, self._tensors, self._arithmetic = session, tensors, arithmetic
        self._schedule = CheckSchedule()
        self._repairs = 0
        self._warned: set[str] = set()

    def digest(self, step: int, world: World, catching_up: Collection[int]) -> StateDigest | None:
        """Return the digest of the state before a step; None if the states are not to be compared in it."""
        if world.size < 2 or catching_up or self._session.settings.on_divergence == "off":
            return None
        if not self._schedule.due(step, world.number):
            return None
        began = time.perf_counter()
        return StateDigest(tuple(self._tensors()), time.perf_counter() - began)

    def compare(self, current: Step) -> None:
        """Act on the reports of a step: raise StateDiverged, or ExchangeBroken if states are to be repaired."""
        agreed = self._schedule.agreed
        if self._schedule.observe(current.number, current.reports) and current.digest is not None:
            moment = _Moment(f"before step {current.number}", current.world, current.exchange, agreed)
            self._act(moment, current.digest, [report.checksum for report in current.reports])

    def compare_at_end(self, world: World, exchange: Exchange) -> None:
        """Compare the states after the last step; all members of the world call this. Act as `compare` does."""
        if world.size < 2 or self._session.settings.on_divergence == "off":
            return
        digest = StateDigest(tuple(self._tensors()))
        checksums = exchange.gather(np.array([digest.checksum], np.float64)).result()[:, 0].tolist()
        if len(set(checksums)) > 1:
            self._act(_Moment("after the last step", world, exchange, self._schedule.agreed), digest, checksums)

    def _act(self, moment: _Moment, digest: StateDigest, checksums: Sequence[float]) -> None:
        """Warn of a difference, or raise because of it."""
        difference = self._locate(moment.exchange, digest)
        if isinstance(difference, StateDifference) and difference.severity != "diverged":
            self._warn(moment, difference)
            return
        error = self._error(moment, difference)
        winners = state_check.majority(checksums)
        repair = self._session.settings.on_divergence == "repair" and self._repairs < MAX_REPAIRS
        if repair and self._session.rank not in winners:
            self._session.forget_state()
        # No member ends the world before all know why, and before those that differ have dropped their state.
        with suppress(ExchangeBroken):
            moment.exchange.barrier()
        if not repair:
            raise error
        self._repairs += 1
        losers = [seat.member for rank, seat in enumerate(moment.world.seats) if rank not in winners]
        source = moment.world.seats[winners[0]].member
        cause = f"{', '.join(losers)} diverged ({error.why}) and takes over the state of {source}"
        sys.stderr.write(f"{error.as_warning()}\nshoal: {cause}\n")
        raise ExchangeBroken(cause)

    def _locate(self, exchange: Exchange, digest: StateDigest) -> StateDifference | str:
        """Gather the details of all members; return the difference, or why it cannot be located."""
        machine = zlib.crc32(f"{processor()}\n{self._arithmetic()}".encode())
        names = exchange.gather(np.array([len(digest.tensors), digest.names_hash, machine], np.float64)).result()
        if (names[:, :2] != names[0, :2]).any():
            counts = ", ".join(f"{int(row[0])} at rank {rank}" for rank, row in enumerate(names))
            return f"members hold different sets of tensors: {counts}"
        details = exchange.gather(digest.rows()).result()
        return state_check.difference(digest, details, names[:, 2]) or "the difference is gone"

    def _error(self, moment: _Moment, difference: StateDifference | str) -> StateDiverged:
        since = f"; they were equal before step {moment.agreed}" if moment.agreed is not None else ""
        if isinstance(difference, str):
            why, hint = difference, ""
        else:
            values = ", ".join(f"{value:.9g} at rank {rank}" for rank, value in enumerate(difference.values))
            others = (
                f", and {difference.differing - 1} more {plural(difference.differing - 1, 'tensor')}"
                if difference.differing > 1
                else ""
            )
            why, hint = f"{difference.tensor.name} differs ({values}){others}{since}", difference.tensor.hint
        return StateDiverged(
            "members no longer hold the same state",
            where=f"{moment.when}, world {moment.world.number}",
            why=why,
            do=f"find what the script does on one member alone; likely {hint or CAUSES}",
        )

    def _warn(self, moment: _Moment, difference: StateDifference) -> None:
        if difference.severity in self._warned:
            return
        self._warned.add(difference.severity)
        rounding = difference.severity == "rounding"
        warning: ShoalError = StateDrifts(
            f"members hold slightly different values of {difference.tensor.name}"
            if rounding
            else f"members hold different values of the buffer {difference.tensor.name}",
            where=moment.when,
            why="their machines or numbers of threads differ, and so does their rounding"
            if rounding
            else "it changes with the samples that a member computes; only BatchNorm's statistics are averaged",
            do="nothing, unless every bit counts" if rounding else "compute it from values that all members share",
        )
        sys.stderr.write(f"{warning.as_warning()}\n")


@cache
def processor() -> str:
    """Return what is known of the processor: its model and its instruction sets."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    return "\n".join(line for line in first if line.startswith(("model", "flags")))
