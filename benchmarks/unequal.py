"""Unequal machines: samples/s with learned shares, against equal shares, the ratio rule and the best possible shares.

All sides of a case are alive at once and take turns, block by block, while the others wait at a gate. What a member
costs is emulated on the wall (`fixed_s + sample_s * samples / speed`), so that the best shares and the best step are
known and other load disturbs little; one case has real CPU quotas instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import quota
from benchmarks.commits import TimedOutError
from benchmarks.rounds import say
from benchmarks.sides.side import Load, Side
from benchmarks.sides.unequal import UnequalDdp, UnequalShoal
from shoal.testing.emulated_speeds import Speed, best_shares, machines, step_s

FIXED_S = 0.005
LEARNING_STEPS = 30
FOLLOWED = 1.05
BLOCK_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """Machines, their job, and the steps per block of each side; `learning` is the length of the first block."""

    name: str
    speeds: tuple[Speed, ...]
    blocks: int
    steps: dict[str, int]
    batch: int = 128
    sample_s: float = 0.0015
    learning: int = LEARNING_STEPS
    cap: int | None = None
    floor: int | None = None
    schedule: bool = False
    quotas: tuple[float, ...] = ()
    sides: tuple[str, ...] = field(default=("ddp", "equal", "ratio", "model", "oracle"))

    @property
    def emulate(self) -> str:
        return "" if self.quotas else machines(*self.speeds, sample_s=self.sample_s, fixed_s=FIXED_S)

    @property
    def settings(self) -> dict[str, str]:
        bounds = {"shares.max": self.cap, "shares.min": self.floor}
        return {key: str(value) for key, value in bounds.items() if value is not None}

    def best(self, step: int = 0) -> tuple[int, ...]:
        """Return the best shares within the bounds: members at a bound are fixed, the others share the rest."""
        shares = list(best_shares(self.told, self.batch, len(self.speeds), step))
        cap, floor = self.cap or self.batch, self.floor or 0
        while sum(min(max(one, floor), cap) for one in shares) != sum(shares) or max(shares) > cap:
            shares = [min(max(one, floor), cap) for one in shares]
            while sum(shares) != self.batch:
                more = sum(shares) < self.batch
                free = [n for n, one in enumerate(shares) if (one < cap if more else one > floor)]
                changed = [[*shares[:n], shares[n] + (1 if more else -1), *shares[n + 1 :]] for n in free]
                shares = min(changed, key=lambda one: step_s(self.told, one, step))
        return tuple(shares)

    @property
    def told(self) -> str:
        """Return the emulation setting of the machines; quotas count as speeds."""
        return self.emulate or machines(*self.speeds, sample_s=self.sample_s)

    def equal(self) -> tuple[int, ...]:
        whole, rest = divmod(self.batch, len(self.speeds))
        return tuple(whole + (number < rest) for number in range(len(self.speeds)))


def planned(quick: bool) -> list[Case]:
    """Return the cases of a run. Sides with constant shares need few steps."""
    few = {"ddp": 4, "equal": 4, "ratio": 10, "model": 40, "oracle": 6}
    alike = {"ddp": 10, "equal": 40, "model": 40}
    flip, dip = ("0.25:1@50", "1:0.25@50"), ("1:0.25@50:1@100", 1)
    changing = Case(
        "flip 1:4 → 4:1",
        flip,
        0,
        {},
        64,
        sample_s=0.001,
        learning=110,
        schedule=True,
        sides=("ddp", "equal", "ratio", "model"),
    )
    if quick:
        return [
            Case("4:1", (1, 0.25), 2, {**few, "model": 20}, sample_s=0.001),
            Case("1:1", (1, 1), 2, alike, sample_s=0.001, learning=20, sides=("ddp", "equal", "model")),
            replace(changing, sides=("equal", "model")),
        ]
    return [
        Case("8:1", (1, 0.125), 5, few),
        Case("4:1", (1, 0.25), 5, few),
        Case("2:1", (1, 0.5), 5, few),
        Case("1:1", (1, 1), 10, alike, sample_s=0.001, sides=("ddp", "equal", "model")),
        Case("4:2:1, cap 64, floor 16", (1, 0.5, 0.25), 5, few, cap=64, floor=16),
        # Over four members a step is short, beside what it takes to wake them all on two cores.
        Case("8:8:4:1", (1, 1, 0.5, 0.125), 5, few, sample_s=0.0025),
        changing,
        replace(changing, name="1 → 1/4 → 1 beside 1", speeds=dip, learning=150),
        Case("4:1 by quota", (1, 0.25), 4, {**few, "model": 30}, 320, quotas=(0.8, 0.2)),
    ]


def play(case: Case, scratch: Path) -> dict[str, Any]:
    """Run all sides of a case in turns; return the figures of each and the theoretical ones."""
    before = os.getloadavg()[0]
    with quota.groups(case.sides, case.quotas) as groups:
        if groups is None:
            return {"failed": "control groups cannot be made here"}
        jobs = {name: _side(case, name, scratch / name, groups.get(name, "")) for name in case.sides}
        try:
            starts = _take_turns(case, jobs)
            found = {name: _figures(case, name, job, starts[name]) for name, job in jobs.items()}
            for name, job in jobs.items():
                if isinstance(job, UnequalShoal):
                    found[name]["story"] = job.story()
        finally:
            for job in jobs.values():
                job.end()
    theory = {"equal": list(case.equal()), "best": list(case.best()), "gain": _theoretical_gain(case, found)}
    load = [round(before, 2), round(os.getloadavg()[0], 2)]
    described = {"speeds": list(case.speeds), "batch": case.batch, "emulate": case.emulate, "quotas": case.quotas}
    return {**described, "cap": case.cap, "floor": case.floor, "load": load, "theory": theory, "sides": found}


def _side(case: Case, name: str, directory: Path, groups: str) -> Side:
    directory.mkdir(parents=True)
    load = Load(model="cnn" if case.quotas else "tiny", batch=case.batch, gated=True)
    if name == "ddp":
        return UnequalDdp(directory, load, case.emulate, groups)
    policy = "fixed:" + ",".join(map(str, case.best())) if name == "oracle" else name
    bounds = {} if name == "equal" else case.settings
    return UnequalShoal(directory, load, name, {"shares.policy": policy, **bounds}, case.emulate, groups)


def _take_turns(case: Case, jobs: dict[str, Side]) -> dict[str, list[int]]:
    """Let every job do its blocks in alternating order; return the first step of each job's blocks and the end."""
    members = len(case.speeds)
    for job in jobs.values():
        _open_gate(job, 1)
        job.start(members)
    for job in jobs.values():
        _wait_for_step(job, 0, members)
    starts = {name: [0, 1] for name in jobs}
    for block in range(case.blocks + 1):
        for name, job in list(jobs.items())[:: 1 if block % 2 else -1]:
            if not block and not (case.schedule or name in ("model", "ratio")):
                continue
            until = starts[name][-1] + (case.steps[name] if block else case.learning)
            _open_gate(job, until)
            _wait_for_step(job, until - 1, members)
            starts[name].append(until)
    return starts


def _open_gate(job: Side, step: int) -> None:
    part = job.directory / "gate.part"
    part.write_text(str(step))
    part.rename(job.directory / "gate")


def _wait_for_step(job: Side, step: int, members: int) -> None:
    ends = time.monotonic() + BLOCK_S
    while time.monotonic() < ends and job.alive():
        if len({commit.pid for commit in job.commits.refresh()[-8 * members :] if commit.step == step}) == members:
            return
        time.sleep(0.05)
    raise TimedOutError(f"{job.name} did not reach step {step}")


# --- figures


def _figures(case: Case, name: str, job: Side, starts: list[int]) -> dict[str, Any]:
    """Return the seconds of the steps by block, and the shares that every member logged."""
    numbers = {int(path.stem): int(path.read_text()) for path in job.directory.glob("*.member")}
    members = len(case.speeds)
    shares: dict[int, list[int]] = {}
    at: dict[int, float] = {}
    for commit in job.commits.refresh():
        shares.setdefault(commit.step, [0] * members)[numbers[commit.pid]] = commit.samples
        at[commit.step] = max(commit.at, at.get(commit.step, 0.0))
    steps = range(starts[-1])
    # The first step of a block is left out: it contains the waiting for its turn.
    took_s = {step: at[step] - at[step - 1] for step in steps if step and step not in starts}
    blocks = [
        median(took_s[step] for step in range(first, last) if step in took_s) for first, last in pairwise(starts[1:])
    ]
    given = [tuple(shares[step]) for step in steps]
    found = {
        "blocks_s": blocks,
        "took_s": {str(step): round(seconds, 6) for step, seconds in took_s.items()},
        "shares": [[list(one), len(list(same))] for one, same in groupby(given)],
        "drift": max(abs(sum(one) - case.batch) for one in given),
        "caps_broken": sum(share > (case.cap or case.batch) for one in given for share in one),
        "floors_broken": sum(share < (case.floor or 0) for one in given for share in one),
    }
    if name in ("model", "ratio"):
        found |= _changes(case, given)
    if name == "oracle" and given[-1] != case.best():
        found["failed"] = "members came in another order, so that the fixed shares went to others"
    return found


def _changes(case: Case, given: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Return when shares changed, and how many steps they needed to be nearly optimal after each change of speed."""
    changed = [step for step in range(1, len(given)) if given[step] != given[step - 1]]
    found: dict[str, Any] = {"changed_at": changed}
    if not case.schedule:
        found["stationary_steps"] = len(given) - LEARNING_STEPS
        found["stationary_changes"] = sum(step >= LEARNING_STEPS for step in changed)
    if not case.quotas:
        over = [
            step_s(case.told, one, step) / step_s(case.told, case.best(step), step) for step, one in enumerate(given)
        ]
        flips = _flips(case, len(given))
        ends = [*flips[1:], len(given)]
        found["over_best"] = sum(over[LEARNING_STEPS:]) / len(over[LEARNING_STEPS:])
        found["learning_steps"] = sum(over) - len(over)
        found["over_best_at_end"] = [over[end - 1] for end in ends]
        found["followed_after"] = [_followed(over[begin:end]) for begin, end in zip(flips, ends, strict=True)]
    return found


def _flips(case: Case, steps: int) -> list[int]:
    """Return the steps at which the best shares change, 0 included."""
    return [0] + [step for step in range(1, steps) if case.best(step) != case.best(step - 1)]


def _followed(over: Sequence[float]) -> int | None:
    """Return after how many steps the shares stay within a few per cent of the best; None if they never do."""
    late = [step for step, one in enumerate(over) if one > FOLLOWED]
    after = late[-1] + 1 if late else 0
    return after if after < len(over) else None


def _theoretical_gain(case: Case, found: dict[str, Any]) -> float:
    """Return how much faster the best shares are than equal ones, over the counted steps."""
    steps = [int(step) for step in found["model"]["took_s"]] if case.schedule else [0]
    equal_s = sum(step_s(case.told, case.equal(), step) for step in steps)
    return equal_s / sum(step_s(case.told, case.best(step), step) for step in steps)


def measure(quick: bool, scratch: Path, only: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (case, figures) for each case."""
    for number, case in enumerate(planned(quick)):
        if only not in case.name:
            continue
        began = time.monotonic()
        try:
            figures = play(case, scratch / f"unequal-{number}")
        except TimedOutError as failure:
            figures = {"failed": str(failure)}
        figures["seconds"] = round(time.monotonic() - began)
        say(f"unequal, {case.name}: {figures['seconds']} s; {figures.get('failed', '')}")
        yield case.name, figures
