"""The page with the figures of the engines and their goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

Found = dict[str, Any]
OURS = "shoal"
START_GOAL = 1.0
LOSS_GOAL = 0.1
WHAT = {"slurm": "Slurm", "ray": "Ray", "ssh": "ssh hosts"}


def page(found: Found) -> str:
    """Return the whole page, with the machine that it was measured on."""
    lines = ["# Engines", ""]
    for part, title in (
        ("start", "submit → first step"),
        ("loss", "node loss → next commit"),
        ("leftovers", "leftovers"),
    ):
        if part in found:
            on = found[part]["machine"]
            lines += [
                f"{title[0].upper()}{title[1:]}: {found[part]['began']} UTC, {on['cpu']}, {on['cores']} cores, "
                f"{on['memory_gib']} GiB; Python {on['python']}, torch {on['torch']}; "
                f"load before: {on['load_before']}.",
                "",
            ]
    lines += ["| figure | Shoal | its own way | goal | met |", "| --- " * 5 + "|"]
    rows = [*_starts(found), *_losses(found), *_leftovers(found)]
    return "\n".join([*lines, *rows, ""])


def _starts(found: Found) -> Iterator[str]:
    for site, sides in found.get("start", {}).get("sites", {}).items():
        for peer in [name for name in sides if name != OURS]:
            yield _against(f"submit → first step, {WHAT[site]}", sides, peer, "first_step_s", START_GOAL)


def _losses(found: Found) -> Iterator[str]:
    for site, sides in found.get("loss", {}).get("sites", {}).items():
        for peer in [name for name in sides if name != OURS]:
            yield _against(f"node loss → next commit, {WHAT[site]}", sides, peer, "recovery_s", LOSS_GOAL)
            ours, theirs = (_values(sides[name], "lost_steps") for name in (OURS, peer))
            met = _met(max(ours) == 0 if ours else None)
            yield f"| … steps lost | {_spread(ours, '.0f')} | {peer}: {_spread(theirs, '.0f')} | 0 | {met} |"


def _leftovers(found: Found) -> Iterator[str]:
    for one in found.get("leftovers", {}).get("rounds", []):
        figure = (
            f"left after {one['crashes']} crashes, {one['engine']} pools (killed or frozen at random: {one['told']})"
        )
        told = f"{one['processes']} processes, {one['jobs']} jobs" if "failed" not in one else one["failed"]
        met = _met("failed" not in one and one["processes"] == one["jobs"] == 0)
        yield f"| {figure} | {told} | - | 0, 0 | {met} |"


def _against(figure: str, sides: Found, peer: str, key: str, goal: float) -> str:
    ours, theirs = _values(sides[OURS], key), _values(sides[peer], key)
    told = f"{_spread(ours, '.2f', ' s')}{_failures(sides[OURS])}"
    them = f"{peer}: {_spread(theirs, '.2f', ' s')}{_failures(sides[peer])}"
    if not ours or not theirs:
        return f"| {figure} | {told} | {them} | ≤ {goal:g} x | - |"
    ratio = median(ours) / median(theirs)
    return f"| {figure} | {told} | {them} | {ratio:.3g} x (≤ {goal:g}) | {_met(ratio <= goal)} |"


def _values(figures: Sequence[Found], key: str) -> list[float]:
    return [one[key] for one in figures if key in one]


def _failures(figures: Sequence[Found]) -> str:
    failures = sum("failed" in one for one in figures)
    return f"; {failures} of {len(figures)} never" if failures else ""


def _spread(values: Sequence[float], form: str, unit: str = "") -> str:
    if not values:
        return "-"
    return f"{median(values):{form}}{unit} ({min(values):{form}}-{max(values):{form}})"


def _met(yes: bool | None) -> str:
    return "-" if yes is None else "yes" if yes else "**no**"
