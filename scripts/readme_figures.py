#!/usr/bin/env python3
"""Write the tables of figures in README.md from the result pages that it links, so that they cannot differ.

scripts/readme_figures.py            rewrite the tables
scripts/readme_figures.py --check    exit 1 if they are out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
SIDES = ("Shoal", "torchft", "torchft, hasty", "torchrun")
# What README calls a figure, and the rows of reference.md it is made of.
RECOVERY = {
    "`kill -9` → next committed step": "kill -9 → next commit (cnn 20 ms steps)",
    "steps lost by it": "steps lost by a kill -9 (cnn 20 ms steps)",
    "crashed member back at work": "crashed member back at work (cnn 20 ms steps)",
    "stall of the others on a notice": "stall of the others on a notice (cnn 20 ms steps)",
    "hang (SIGSTOP) → next committed step": "SIGSTOP → next commit (cnn 20 ms steps)",
}
SPEEDS = ("8:1", "4:1", "2:1")


def main(arguments: list[str]) -> int:
    """Rewrite README.md, or with --check only compare it; return the exit code."""
    current = README.read_text()
    updated = fill(current, {"recovery": recovery_table(), "unequal": unequal_table()})
    if arguments == ["--check"]:
        if updated != current:
            print("README.md: figures differ from benchmarks/results; run scripts/readme_figures.py")
        return int(updated != current)
    README.write_text(updated)
    return 0


def fill(text: str, tables: dict[str, str]) -> str:
    """Return `text` with each table between its pair of markers replaced."""
    for name, table in tables.items():
        begin, end = f"<!-- figures: {name} -->\n", "<!-- end of figures -->"
        head, found, rest = text.partition(begin)
        if not found:
            raise SystemExit(f"README.md has no marker {begin.strip()}")
        text = f"{head}{begin}{table}\n{end}{rest.partition(end)[2]}"
    return text


def recovery_table() -> str:
    """Return the figures of faults, Shoal beside its peers."""
    page = read_table("reference.md")
    lines = ["| | Shoal | torchft, tuned | torchft, hasty | torchrun |", "| --- | --- | --- | --- | --- |"]
    for name, row in RECOVERY.items():
        lines.append(f"| {name} | {' | '.join(median(page[row][peer]) for peer in SIDES)} |")
    ratios = [page[f"step time, {model}"]["goal"].split()[0] for model in ("cnn", "wide")]
    small, large = (f"{float(ratio):.2f}" for ratio in ratios)
    lines.append(f"| step time relative to plain DDP: small CNN, 26 M parameters | {small}, {large} | - | - | - |")
    return "\n".join(lines)


def unequal_table() -> str:
    """Return the gains over equal shares at several ratios of speed."""
    page = read_table("unequal.md")
    lines = ["| speeds | learned shares | best possible |", "| --- | --- | --- |"]
    for speeds in SPEEDS:
        gained, best = re.findall(r"\d+\.\d+", page[f"gain at {speeds}"]["found"])[:2]
        lines.append(f"| {speeds} | {float(gained):.2f} | {float(best):.2f} |")
    return "\n".join(lines)


def read_table(name: str) -> dict[str, dict[str, str]]:
    """Return a result page's first table by figure, each row a mapping from column to cell; of equal rows the first."""
    first = next(block for block in (RESULTS / name).read_text().split("\n\n") if block.startswith("| "))
    columns, _, *rows = (line.strip("| ").split(" | ") for line in first.splitlines())
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        table.setdefault(row[0], dict(zip(columns, row, strict=True)))
    return table


def median(cell: str) -> str:
    """Return a cell without its range: '0.07 s (0.05-0.08)' is 0.07 s."""
    return cell.partition(" (")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
