"""How many members a run may have, and which names."""

from __future__ import annotations

import pytest

from shoal.core.runs import admission
from shoal.errors import BadCount, BadName


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 2), (1, 10_001), (1, 10**9)])
def test_impossible_number_of_members_is_refused(low: int, high: int) -> None:
    with pytest.raises(BadCount):
        admission.check_members(low, high)


def test_largest_run_is_admitted() -> None:
    admission.check_members(1, 10_000)


@pytest.mark.parametrize("name", ["x" * 101, "a\nb", "\x1b[31mred", "a\x00", "a\u202eb"])
def test_name_that_a_terminal_cannot_show_is_refused(name: str) -> None:
    with pytest.raises(BadName):
        admission.check_name(name)
    admission.check_name(admission.printable_name(name))


@pytest.mark.parametrize("name", ["", "train", "café 3", "模型"])
def test_usual_name_is_admitted(name: str) -> None:
    admission.check_name(name)
