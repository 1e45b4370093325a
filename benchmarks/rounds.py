"""Schedule of faults: every repetition starts each side once, applies its faults in order, and ends it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import faults
from benchmarks.commits import TimedOutError
from benchmarks.sides.shoal import Shoal
from benchmarks.sides.side import MOST_MEMBERS, Load, Side
from benchmarks.sides.torchft import HastyTorchft, Torchft
from benchmarks.sides.torchrun import Torchrun

SLOW_S, FAST_S = 0.2, 0.02


@dataclass(frozen=True, slots=True)
class Round:
    """One job of one side and the faults applied to it in order."""

    side: type[Side]
    load: Load
    faults: tuple[str, ...]
    members: int = MOST_MEMBERS

    @property
    def name(self) -> str:
        return f"{self.load.model} {round(self.load.pace_s * 1000)} ms"


def planned(quick: bool) -> list[Round]:
    """Return the rounds of one repetition."""
    fast, slow, wide = Load(pace_s=FAST_S), Load(pace_s=SLOW_S), Load(model="wide", pace_s=SLOW_S)
    every = ("crash", "crash", "hang", "notice", "loss", "join", "loss", "join")
    if quick:
        once = ("crash", "hang", "notice", "loss", "join")
        return [Round(Shoal, fast, once), Round(Torchft, fast, once), Round(Torchrun, fast, ("crash",))]
    return [
        *(Round(side, load, every) for load in (fast, slow) for side in (Shoal, Torchft)),
        *(Round(HastyTorchft, load, ("crash",)) for load in (fast, slow)),
        Round(Torchrun, fast, ("crash",)),
        Round(Torchrun, slow, ("crash", "loss", "join", "hang")),
        *(Round(side, wide, ("crash", "loss", "join", "loss", "join")) for side in (Shoal, Torchft)),
    ]


def play(one: Round, scratch: Path, chance: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start the round's job, apply its faults, and yield (fault, figures) for each."""
    scratch.mkdir(parents=True)
    side = one.side(scratch, one.load)
    try:
        side.start(one.members)
        for fault in one.faults:
            try:
                yield fault, getattr(faults, fault)(side, chance)
            except (TimedOutError, ProcessLookupError, psutil.NoSuchProcess) as failure:
                yield fault, {"failed": str(failure)}
                return
            if fault == "notice" and not _whole_again(side):
                side.add()
    finally:
        side.end()


def _whole_again(side: Side) -> bool:
    """Return whether the side itself replaces a member that left after a notice."""
    try:
        side.commits.wait_until_steady(MOST_MEMBERS, 30.0, side.alive)
    except TimedOutError:
        return False
    return True


def blackouts(side_kind: type[Side], down_s: float, times: int, scratch: Path) -> list[dict[str, Any]]:
    """Lose the coordinator several times in one job."""
    scratch.mkdir(parents=True)
    side = side_kind(scratch, Load(pace_s=FAST_S))
    results: list[dict[str, Any]] = []
    try:
        side.start(MOST_MEMBERS)
        for _ in range(times):
            results.append(faults.blackout(side, down_s))
            say(f"{side.name}: coordinator down: {shown(results[-1])}")
    except (TimedOutError, ProcessLookupError, psutil.NoSuchProcess) as failure:
        results.append({"down_s": down_s, "failed": str(failure)})
    finally:
        side.end()
    return results


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def shown(figures: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
    )
