"""Collection rules for every test group."""

from __future__ import annotations

from pathlib import Path

import pytest

KERAS = Path(__file__).parent / "keras"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect the Keras tests only when the command line names their folder.

    They import TensorFlow, and Triton (part of PyTorch's CUDA build) crashes if it is loaded after TensorFlow.
    """
    named = any(Path(argument.partition("::")[0]).resolve().is_relative_to(KERAS) for argument in config.args)
    return True if collection_path == KERAS and not named else None
