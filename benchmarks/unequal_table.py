"""Tables of the figures for unequal machines and their goals, as ratios of one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

Found = dict[str, Any]
OF_THEORY = 0.95
OVERHEAD = 1.01
MOST_CHANGES = 2


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure, its goal, and whether it is met."""

    figure: str
    found: str
    goal: str
    met: bool | None


def page(found: Found) -> str:
    """Return both tables with the machine that they were measured on."""
    on, cases = found["machine"], found["unequal"]
    machine = f"{on['cpu']}, {on['cores']} cores, {on['memory_gib']} GiB; Python {on['python']}, torch {on['torch']}"
    loads = [load for one in cases.values() for load in one.get("load", [])]
    busy = f"load {min(loads):.1f} to {max(loads):.1f}" if loads else "load unknown"
    head = f"# Unequal machines, {found['began']} UTC\n\n{machine}; {busy}; took {found.get('took_s', '?')} s.\n"
    return f"{head}\n{render(found)}\n"


def render(found: Found) -> str:
    """Return the table of goals, then that of every case."""
    cases = found["unequal"]
    lines = ["| figure | found | goal | met |", "| --- " * 4 + "|"]
    for goal in _goals(cases):
        met = "-" if goal.met is None else ("yes" if goal.met else "**no**")
        lines.append(f"| {goal.figure} | {goal.found} | {goal.goal} | {met} |")
    heads = ("speeds", "best there is", "model", "model, whole run", "ratio", "best shares, fixed", "model over DDP")
    tail = ("changes of model", "of ratio", "steps that learning cost", "by ratio")
    lines += ["", "Samples/s over those of equal shares, and how often shares changed:", ""]
    lines += ["| " + " | ".join((*heads, *tail)) + " |", "| --- " * (len(heads) + len(tail)) + "|"]
    for name, case in cases.items():
        lines.append("| " + " | ".join((name, *_cells(case))) + " |")
    return "\n".join(lines)


def _cells(case: Found) -> list[str]:
    if "failed" in case:
        return [case["failed"], *["-"] * 9]
    gains = [_gain(case, "model"), whole_gain(case, "model"), _gain(case, "ratio"), _gain(case, "oracle")]
    over_ddp = _gain(case, "model", "ddp")
    changes = [_number(case, side, "changed_at") for side in ("model", "ratio")]
    cost = [case["sides"].get(side, {}).get("learning_steps") for side in ("model", "ratio")]
    shown = [None if case["quotas"] else case["theory"]["gain"], *gains, over_ddp]
    return [*(_shown(one) for one in shown), *changes, *("-" if one is None else f"{one:.1f}" for one in cost)]


def _goals(cases: dict[str, Found]) -> Iterator[Goal]:
    good = {name: case for name, case in cases.items() if "failed" not in case}
    for name, case in good.items():
        if case["theory"]["gain"] < 1.01:
            yield from _overhead(name, case)
        elif "followed_after" in case["sides"]["model"] and len(case["sides"]["model"]["followed_after"]) > 1:
            yield from _schedule(name, case)
        else:
            yield from _gains(name, case)
        yield from _stationary(name, case)
    # Not DDP's: what its equal shares cannot divide, it leaves out.
    ours = [side for case in good.values() for name, side in case["sides"].items() if name != "ddp"]
    steps = sum(len(side["took_s"]) for side in ours)
    for key, figure in (
        ("drift", "global batch drift"),
        ("caps_broken", "caps broken"),
        ("floors_broken", "floors broken"),
    ):
        worst = max((side[key] for side in ours), default=0)
        yield Goal(f"{figure}, all cases", f"{worst} in {steps} steps", "0", worst == 0)
    for name, case in cases.items():
        if "failed" in case:
            yield Goal(name, case["failed"], "-", None)


def _gains(name: str, case: Found) -> Iterator[Goal]:
    theory = case["theory"]["gain"]
    for when, gain in (("", _gain(case, "model")), (", learning included", whole_gain(case, "model"))):
        if gain is None:
            continue
        if case["quotas"]:
            yield Goal(f"gain at {name}{when}", f"{gain:.3f}", "no theory: costs are real", None)
            continue
        found = f"{gain:.3f} of {theory:.3f}: {gain / theory:.1%} (of what is gained: {(gain - 1) / (theory - 1):.1%})"
        yield Goal(f"gain at {name}{when}", found, f"≥ {OF_THEORY:.0%}", gain >= OF_THEORY * theory)
    fixed = _gain(case, "model", "oracle")
    if fixed is not None and not case["quotas"]:
        yield Goal(f"gain at {name}, over that of the best shares, fixed", f"{fixed:.1%}", "-", None)


def _schedule(name: str, case: Found) -> Iterator[Goal]:
    theory, gain = case["theory"]["gain"], whole_gain(case, "model")
    if gain is not None:
        yield Goal(f"gain, {name}, whole run", f"{gain:.3f} of {theory:.3f}: {gain / theory:.1%}", "-", None)
    for side in ("model", "ratio"):
        if side in case["sides"]:
            after, ends = case["sides"][side]["followed_after"], case["sides"][side]["over_best_at_end"]
            told = [
                f"never (stays at {end:.3f} x the best)" if one is None else str(one)
                for one, end in zip(after, ends, strict=True)
            ]
            steps = ", ".join(told)
            yield Goal(f"steps until the speeds are followed, {name}, {side}", steps, "-", None)


def _overhead(name: str, case: Found) -> Iterator[Goal]:
    gain = _gain(case, "model")
    if gain is not None:
        found = f"{1 / gain:.4f} x equal shares; {1 / (_gain(case, 'model', 'ddp') or 1):.3f} x DDP"
        yield Goal(f"step time at {name}", found, f"≤ {OVERHEAD}", 1 / gain <= OVERHEAD)


def _stationary(name: str, case: Found) -> Iterator[Goal]:
    model = case["sides"]["model"]
    if "stationary_changes" in model:
        changes, steps = model["stationary_changes"], model["stationary_steps"]
        yield Goal(
            f"changes at {name}, stationary", f"{changes} in {steps} steps", "≤ 2 in 200", changes <= MOST_CHANGES
        )


def _gain(case: Found, side: str, over: str = "equal") -> float | None:
    """Return the median over the blocks of how much faster a side is than the other, once it has learned."""
    ours, theirs = _settled(case, side), _settled(case, over)
    if not ours or not theirs:
        return None
    return median(b / a for a, b in zip(ours, theirs, strict=True))


def _settled(case: Found, side: str) -> list[float]:
    found = case["sides"].get(side)
    if found is None or "failed" in found:
        return []
    return list(found["blocks_s"][1:] if side in ("model", "ratio") else found["blocks_s"])


def whole_gain(case: Found, side: str) -> float | None:
    """Return how much faster a side is than equal shares from the second step on."""
    if side not in case["sides"]:
        return None
    return float(mean(case["sides"]["equal"]["took_s"].values()) / mean(case["sides"][side]["took_s"].values()))


def _number(case: Found, side: str, key: str) -> str:
    if side not in case["sides"]:
        return "-"
    return f"{len(case['sides'][side][key])} in {len(case['sides'][side]['took_s'])}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
