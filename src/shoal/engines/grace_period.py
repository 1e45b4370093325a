"""Grace period of an agent: the time its members have to hand over, shorter than its engine waits before SIGKILL.

Two clocks run when an allocation is cancelled: the engine's, after which everything is killed, and the agent's, after
which it kills its members itself and reports their exits. If the engine's were shorter, the exits would be lost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from shoal.engines.engine import AllocationRequest

OPTION = "--grace"
USUAL_S = 30.0
# What an agent needs after the grace period: to kill its members and to report their exits.
MARGIN_S = 5.0


def of(request: AllocationRequest) -> float:
    """Return the grace period of the requested agent, in seconds."""
    return in_options(request.options)


def in_options(options: Sequence[str]) -> float:
    """Return the grace period that the agent's options set, in seconds."""
    for name, value in itertools.pairwise(options):
        if name == OPTION:
            return float(value)
    return USUAL_S


def within(request: AllocationRequest, granted_s: float) -> AllocationRequest:
    """Return the request with a grace period that ends before an engine sends SIGKILL after `granted_s`."""
    longest_s = max(granted_s - MARGIN_S, granted_s / 2)
    if of(request) <= longest_s:
        return request
    options = request.options
    kept = [word for at, word in enumerate(options) if OPTION not in (word, *options[max(0, at - 1) : at])]
    return dataclasses.replace(request, options=(*kept, OPTION, f"{longest_s:g}"))
