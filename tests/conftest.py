"""Rules for every test group: what is collected, and how property tests are run."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

# Some CPUs announce AMX but may not use it: bfloat16 would then end torch and TensorFlow with SIGILL. Processes that
# tests start inherit the variable.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Below nohup and in a background job of a shell these are ignored, also by processes that tests start and interrupt.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

KERAS = Path(__file__).parent / "keras"
HAS_TORCH = importlib.util.find_spec("torch") is not None
IMPORTS_TORCH = re.compile(r"^\s*(import|from) (shoal\.)?torch\b", re.MULTILINE)
# Examples are counted, never timed: a slow or busy machine must not turn a property test red. They are the same in
# every run, unless SHOAL_EXPLORE is set: an unrelated change should not meet a new counterexample.
settings.register_profile(
    "shoal",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="SHOAL_EXPLORE" not in os.environ,
)
settings.load_profile("shoal")
# A guard against hangs only: shrinking a counterexample takes minutes, and must be allowed to finish.
PROPERTY_HANG_S = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every hypothesis test time to shrink a counterexample."""
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.timeout(PROPERTY_HANG_S))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect the Keras tests only when the command line names their folder, and PyTorch's only where it is installed.

    Keras tests import TensorFlow, and Triton (part of PyTorch's CUDA build) crashes if it is loaded after TensorFlow.
    """
    if collection_path == KERAS:
        named = any(Path(argument.partition("::")[0]).resolve().is_relative_to(KERAS) for argument in config.args)
        return None if named else True
    if not HAS_TORCH and collection_path.suffix == ".py" and IMPORTS_TORCH.search(collection_path.read_text()):
        return True
    return None
