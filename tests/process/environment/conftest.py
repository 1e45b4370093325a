from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.environment.bare_machine import Machine

from shoal.testing import wheelhouse


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = wheelhouse.fill(tmp_path_factory.mktemp("wheels"))
    wheelhouse.add(folder, "greeting", "1.0", {"greeting.py": b"WORDS = 'hello'\n"})
    return folder


@pytest.fixture
def machine(tmp_path: Path, wheels: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path, wheels)
    try:
        yield machine
    finally:
        machine.close()
