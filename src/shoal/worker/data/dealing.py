"""How global batches are dealt out, by the settings of a run."""

from __future__ import annotations

from typing import Any

from shoal.core.shares.balancer import FIRST_WINDOWS, ShareBalancer, parse


def balance_of(
    settings: Any, shares: str | None, ahead: int, first_windows: tuple[int, ...] = FIRST_WINDOWS
) -> ShareBalancer:
    """What deals out the shares; `shares` is what the script asks for, if anything."""
    rules = parse(
        shares or settings.shares_policy,
        threshold=settings.shares_threshold,
        window=settings.shares_window,
        min=settings.shares_min,
        max=settings.shares_max,
        mode=settings.shares_mode,
    )
    return ShareBalancer(rules, ahead, first_windows)
