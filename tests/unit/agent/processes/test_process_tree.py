"""Process trees of members."""

from __future__ import annotations

import os

import psutil
import pytest

from shoal.agent.processes import process_tree
from shoal.errors import ForeignProcess


def test_process_is_alive_and_part_of_its_own_tree() -> None:
    own = psutil.Process(os.getpid())
    assert process_tree.is_alive(own)
    assert own in process_tree.tree(own)


def test_process_that_is_not_a_descendant_is_refused() -> None:
    with pytest.raises(ForeignProcess):
        process_tree.own(1)
    assert process_tree.own(2**22 + 1) is None
