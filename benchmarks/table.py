"""Table of the elastic core's goals and whether the figures of a run meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

Found = dict[str, Any]
PEERS = ("torchft", "torchft-hasty", "torchrun")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: Shoal's, the peers', the goal in words, and whether it is met (None: not measured)."""

    figure: str
    ours: str
    peers: tuple[str, str, str]
    goal: str
    met: bool | None


def render(found: Found) -> str:
    """Return a Markdown table of all figures with their goals."""
    rows = [*_kills(found), *_hangs(found), *_joins(found), *_notices(found), *_steps(found), *_blackouts(found)]
    lines = ["| figure | Shoal | torchft | torchft, hasty | torchrun | goal | met |", "| --- " * 7 + "|"]
    for row in rows:
        met = "-" if row.met is None else ("yes" if row.met else "**no**")
        lines.append(f"| {row.figure} | {row.ours} | {' | '.join(row.peers)} | {row.goal} | {met} |")
    return "\n".join(lines)


def page(found: Found) -> str:
    """Return the table with the machine that it was measured on."""
    on = found["machine"]
    machine = f"{on['cpu']}, {on['cores']} cores, {on['memory_gib']} GiB; Python {on['python']}, torch {on['torch']}"
    return f"# Figures of {found['began']} UTC\n\n{machine}; load before: {on['load_before']}.\n\n{render(found)}\n"


def _kills(found: Found) -> Iterator[Row]:
    for load in found.get("faults", {}):
        ours, theirs = _median(found, load, "shoal", "crash", "recovery_s"), _theirs(found, load, "crash", "recovery_s")
        if ours is None:
            continue
        figure = f"kill -9 → next commit ({load} steps)"
        peers = _peers(found, load, "crash", "recovery_s")
        yield Row(
            figure,
            _spread(found, load, "shoal", "crash", "recovery_s"),
            peers,
            *_ratio(ours, theirs["torchft"], 0.3, "torchft"),
        )
        if theirs["torchrun"] is not None:
            yield Row(
                figure,
                _spread(found, load, "shoal", "crash", "recovery_s"),
                peers,
                *_ratio(ours, theirs["torchrun"], 0.02, "torchrun"),
            )
        yield _at_most(found, load, "steps lost by a kill -9", "crash", "lost_steps", 0, "0")
        back = _median(found, load, "shoal", "crash", "back_s")
        theirs_back = _theirs(found, load, "crash", "back_s")["torchft"]
        if back is not None:
            yield Row(
                f"crashed member back at work ({load} steps)",
                _spread(found, load, "shoal", "crash", "back_s"),
                _peers(found, load, "crash", "back_s"),
                *_ratio(back, theirs_back, 0.25, "torchft"),
            )
        if _median(found, load, "shoal", "loss", "recovery_s") is not None:
            yield Row(
                f"machine lost → next commit ({load} steps)",
                _spread(found, load, "shoal", "loss", "recovery_s"),
                _peers(found, load, "loss", "recovery_s"),
                "-",
                None,
            )


def _hangs(found: Found) -> Iterator[Row]:
    for load in found.get("faults", {}):
        if _median(found, load, "shoal", "hang", "recovery_s") is not None:
            yield _at_most(found, load, "SIGSTOP → next commit", "hang", "recovery_s", 5.0, "≤ 5 s")


def _joins(found: Found) -> Iterator[Row]:
    for load in found.get("faults", {}):
        ours = _median(found, load, "shoal", "join", "stall_s")
        if ours is None:
            continue
        yield Row(
            f"stall of the others on a join ({load} steps)",
            _spread(found, load, "shoal", "join", "stall_s"),
            _peers(found, load, "join", "stall_s"),
            *_ratio(ours, _theirs(found, load, "join", "stall_s")["torchft"], 0.5, "torchft"),
        )
        step_s = _median(found, load, "shoal", "crash", "step_s") or 0.0
        yield _at_most(found, load, "stall on a join, in steps", "join", "stall_s", step_s + 0.1, "≤ 1 step + 0.1 s")


def _notices(found: Found) -> Iterator[Row]:
    for load in found.get("faults", {}):
        if _median(found, load, "shoal", "notice", "gone_s") is None:
            continue
        yield _at_most(found, load, "notice → gone", "notice", "gone_s", 3.0, "< lease of 3 s")
        yield _at_most(found, load, "steps lost by a notice", "notice", "lost_steps", 0, "0")
        step_s = _median(found, load, "shoal", "notice", "step_s") or 0.0
        yield _at_most(
            found, load, "stall of the others on a notice", "notice", "stall_s", step_s + 0.1, "≤ 1 step + 0.1 s"
        )


def _steps(found: Found) -> Iterator[Row]:
    for one in found.get("steps", []):
        if "failed" in one:
            yield Row(f"step time, {one['model']}", one["failed"], ("-",) * 3, "≤ 1.03 x DDP", False)
            continue
        ours, plain = one["step_s"]["shoal"], one["step_s"]["ddp"]
        ratio = median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
        shown = f"{median(ours) * 1000:.1f} ms; DDP {median(plain) * 1000:.1f} ms"
        viewed = median(mine / theirs for mine, theirs in zip(ours, one["step_s"]["ddp+view"], strict=True))
        shown += f"; {viewed:.2f} x DDP with bucket views"
        yield Row(f"step time, {one['model']}", shown, ("-",) * 3, f"{ratio:.3f} x DDP (≤ 1.03)", ratio <= 1.03)
        for kind in ("peak_rss", "pss", "uss", "whole_job_pss"):
            mine, theirs = one["memory"]["shoal"][f"{kind}_bytes"], one["memory"]["ddp"][f"{kind}_bytes"]
            shown = f"{mine / 2**20:.0f} MiB; DDP {theirs / 2**20:.0f} MiB"
            judged = mine <= 1.1 * theirs if kind == "peak_rss" else None
            goal = f"{mine / theirs:.2f} x DDP (≤ 1.1)"
            yield Row(f"memory of a member ({kind}), {one['model']}", shown, ("-",) * 3, goal, judged)


def _blackouts(found: Found) -> Iterator[Row]:
    ours = [one for one in found.get("blackout", {}).get("shoal", []) if "failed" not in one]
    if not ours:
        return
    theirs = found["blackout"].get("torchft", [{}])[0]
    down = f"coordinator down for {ours[0]['down_s']:.0f} s"
    lost, slower = median(one["lost_steps"] for one in ours), median(one["slowdown"] for one in ours)
    made = (
        f"{theirs['steps_during']} of {theirs['steps_expected']:.0f}"
        if "steps_during" in theirs
        else theirs.get("failed", "-")
    )
    did = f"{median(one['steps_during'] for one in ours):.0f} of {median(one['steps_expected'] for one in ours):.0f}"
    yield Row(f"{down}: steps made", did, (made, "-", "-"), "all", None)
    yield Row(f"{down}: steps lost", f"{lost:.0f}", ("-",) * 3, "0", lost == 0)
    yield Row(f"{down}: step time", f"{slower:.2f} x", ("-",) * 3, "≤ 1.03 x", 0 < slower <= 1.03)


def _figures(found: Found, load: str, side: str, fault: str, key: str) -> list[float]:
    return [one[key] for one in found["faults"][load].get(side, {}).get(fault, []) if key in one]


def _failures(found: Found, load: str, side: str, fault: str) -> int:
    return sum("failed" in one for one in found["faults"][load].get(side, {}).get(fault, []))


def _median(found: Found, load: str, side: str, fault: str, key: str) -> float | None:
    figures = _figures(found, load, side, fault, key)
    return median(figures) if figures else None


def _theirs(found: Found, load: str, fault: str, key: str) -> dict[str, float | None]:
    return {peer: _median(found, load, peer, fault, key) for peer in PEERS}


def _spread(found: Found, load: str, side: str, fault: str, key: str) -> str:
    """Return the median, the range, and the number of failed attempts as text."""
    figures, failures = _figures(found, load, side, fault, key), _failures(found, load, side, fault)
    failed = f"; {failures} of {failures + len(figures)} never" if failures else ""
    if not figures:
        return f"-{failed}"
    shown: Callable[[float], str] = (
        (lambda value: f"{value:.0f}") if key == "lost_steps" else (lambda value: f"{value:.2f}")
    )
    unit = "" if key == "lost_steps" else " s"
    around = f" ({shown(min(figures))}-{shown(max(figures))})" if len(figures) > 1 else ""
    return f"{shown(median(figures))}{unit}{around}{failed}"


def _peers(found: Found, load: str, fault: str, key: str) -> tuple[str, str, str]:
    first, second, third = (_spread(found, load, peer, fault, key) for peer in PEERS)
    return first, second, third


def _ratio(ours: float, theirs: float | None, goal: float, whose: str) -> tuple[str, bool | None]:
    if not theirs:
        return f"≤ {goal:g} x {whose}", None
    return f"{ours / theirs:.3g} x {whose} (≤ {goal:g})", ours <= goal * theirs


def _at_most(found: Found, load: str, figure: str, fault: str, key: str, most: float, goal: str) -> Row:
    ours = _median(found, load, "shoal", fault, key)
    met = None if ours is None else ours <= most
    return Row(
        f"{figure} ({load} steps)",
        _spread(found, load, "shoal", fault, key),
        _peers(found, load, fault, key),
        goal,
        met,
    )
