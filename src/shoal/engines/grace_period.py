"""How long an agent may take to hand over: less than its engine waits before it kills; pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from shoal.engines.engine import AllocationRequest

OPTION = "--grace"
USUAL_S = 30.0
# What an agent needs to end its members and to say goodbye when their time is over.
MARGIN_S = 5.0


def of(ask: AllocationRequest) -> float:
    """How long the agent gives its members, as its own options say."""
    return in_options(ask.options)


def in_options(options: Sequence[str]) -> float:
    """The same, of the options alone."""
    for name, value in itertools.pairwise(options):
        if name == OPTION:
            return float(value)
    return USUAL_S


def within(ask: AllocationRequest, granted_s: float) -> AllocationRequest:
    """The same, with an agent that is done before an engine that waits so long kills it."""
    most_s = max(granted_s - MARGIN_S, granted_s / 2)
    if of(ask) <= most_s:
        return ask
    kept = [part for at, part in enumerate(ask.options) if OPTION not in (part, *ask.options[max(0, at - 1) : at])]
    return dataclasses.replace(ask, options=(*kept, OPTION, f"{most_s:g}"))
