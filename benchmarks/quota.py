"""Control groups that give a member a part of a core: a machine that really is slower, without sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CONTROLLER = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
# Much more than others have: a quota means nothing if the machine is busy with something else.
WEIGHT = 200_000


@contextmanager
def groups(sides: Sequence[str], parts: Sequence[float]) -> Iterator[dict[str, str] | None]:
    """Yield the prefix of each side's groups, where member i has `parts[i]` of a core; None if not allowed."""
    if not parts:
        yield {}
        return
    above = CONTROLLER / f"shoal-bench-{os.getpid()}"
    made: list[Path] = []
    try:
        try:
            _make(above, made)
            (above / "cpu.shares").write_text(str(WEIGHT))
            for side in sides:
                for number, part in enumerate(parts):
                    group = above / f"{side}-{number}"
                    _make(group, made)
                    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * part)))
        except OSError:
            yield None
            return
        yield {side: str(above / side) for side in sides}
    finally:
        for group in reversed(made):
            _unmake(group)


def _make(group: Path, made: list[Path]) -> None:
    group.mkdir()
    made.append(group)


def _unmake(group: Path) -> None:
    """Remove groups, which keep killed processes until the kernel has reaped them."""
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    group.rmdir()
