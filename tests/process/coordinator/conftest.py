from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.coordinator.fakes import Coordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    found = Coordinator(tmp_path / "c")
    yield found
    found.close()
