"""Lock of an agent's directory."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.agent.processes import orphan_cleanup


def test_directory_is_held_by_one_agent_at_a_time(tmp_path: Path) -> None:
    first = orphan_cleanup.hold(tmp_path)
    assert first is not None
    assert orphan_cleanup.hold(tmp_path) is None
    os.close(first)
    second = orphan_cleanup.hold(tmp_path)
    assert second is not None
    os.close(second)


def test_missing_directory_is_not_held(tmp_path: Path) -> None:
    assert orphan_cleanup.hold(tmp_path / "absent") is None
