"""Exit message of an agent that has ended: the cause, from the end of its log; pure.

Most agents that end early never started: their interpreter is too old or has no Shoal. Python reports that with a usage
text or a traceback, which this module turns into one sentence with the remedy.
"""

from __future__ import annotations

import re

OLDEST_PYTHON = "3.11"
MAX_CHARACTERS = 500
# `-P` came with the oldest Python that agents can use, and is the first thing that an older one rejects.
_TOO_OLD = re.compile(r"[Uu]nknown option:? -P")
_MISSING_MODULE = re.compile(r"No module named '?(\w+)")


def of_log(log: str, python: str = "") -> str:
    """Return the agent's last error with its cause, why its Python cannot run it, or its last line."""
    lines = [line.strip() for line in log.strip().splitlines() if line.strip()]
    if not lines:
        return "it wrote no output"
    errors = [number for number, line in enumerate(lines) if "error[" in line]
    unfit = of_python(" ".join(lines[-5:]), python)
    if unfit and not any(number >= len(lines) - 5 for number in errors):
        return unfit
    if not errors:
        return "its process has ended" if " INFO " in lines[-1] else lines[-1][:MAX_CHARACTERS]
    after = lines[errors[-1] + 1 :]
    why = next((line[3:].strip() for line in after if line.startswith("why ")), "")
    return f"{lines[errors[-1]]}{f' ({why})' if why else ''}"[:MAX_CHARACTERS]


def of_python(output: str, python: str = "") -> str:
    """Return what is wrong with the interpreter that printed this; empty if that is not the cause."""
    interpreter = python or "the machine's Python"
    if _TOO_OLD.search(output):
        return f"{interpreter} is older than Python {OLDEST_PYTHON}: set python = in its pool to a newer one"
    if missing := _MISSING_MODULE.search(output):
        name = "Shoal" if missing[1] == "shoal" else f"{missing[1]}, which Shoal or the pool's setup needs"
        return f"{interpreter} has no {name}: install it there, or set python = in its pool to one that has it"
    return ""
