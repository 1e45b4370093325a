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


def of(request: AllocationRequest) -> float:
    """How long the agent gives its members, as its own options say."""
    return in_options(request.options)


def in_options(options: Sequence[str]) -> float:
    """The same, of the options alone."""
    for name, value in itertools.pairwise(options):
        if name == OPTION:
            return float(value)
    return USUAL_S


def within(request: AllocationRequest, granted_s: float) -> AllocationRequest:
    """The same, with an agent that is done before an engine that waits so long kills it."""
    most_s = max(granted_s - MARGIN_S, granted_s / 2)
    if of(request) <= most_s:
        return request
    kept = [
        part for at, part in enumerate(request.options) if OPTION not in (part, *request.options[max(0, at - 1) : at])
    ]
    return dataclasses.replace(request, options=(*kept, OPTION, f"{most_s:g}"))
