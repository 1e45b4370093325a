"""What an agent that is gone said last, in words that name the cause; pure."""

from __future__ import annotations

import re

OLDEST = "3.11"
LONGEST = 500
# `-P` came with the oldest Python that agents can use, and is the first thing that an older one trips over.
_OLD = re.compile(r"[Uu]nknown option:? -P")
_LACKS = re.compile(r"No module named '?(\w+)")


def of_log(log: str, python: str = "") -> str:
    """Its error with the cause, what keeps its Python from running it, or its last line."""
    lines = [line.strip() for line in log.strip().splitlines() if line.strip()]
    if not lines:
        return "it said nothing"
    errors = [place for place, line in enumerate(lines) if "error[" in line]
    unfit = of_python(" ".join(lines[-5:]), python)
    if unfit and not any(place >= len(lines) - 5 for place in errors):
        return unfit
    if not errors:
        return "its process is gone" if " INFO " in lines[-1] else lines[-1][:LONGEST]
    after = lines[errors[-1] + 1 :]
    why = next((line[3:].strip() for line in after if line.startswith("why ")), "")
    return f"{lines[errors[-1]]}{f' ({why})' if why else ''}"[:LONGEST]


def of_python(said: str, python: str = "") -> str:
    """What is wrong with an interpreter that said this; nothing if that is not it."""
    who = python or "the Python there"
    if _OLD.search(said):
        return f"{who} is older than Python {OLDEST}: name another with python = in its pool"
    if lacks := _LACKS.search(said):
        what = "Shoal" if lacks[1] == "shoal" else f"{lacks[1]}, which Shoal or the setup of the pool needs"
        return f"{who} has no {what}: install it there, or name another with python = in its pool"
    return ""
