"""The names that users import."""

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

import shoal

MOST = 15


def public(module: object) -> list[str]:
    """What a module exports: its __all__, or all names without an underscore that are not modules themselves."""
    own = [n for n, held in vars(module).items() if not n.startswith("_") and not isinstance(held, ModuleType)]
    return sorted(getattr(module, "__all__", own))


def test_the_names_of_shoal_are_frozen(frozen: Callable[[str, str], None]) -> None:
    frozen("shoal.txt", "\n".join(public(shoal)))


def test_the_names_of_shoal_torch_are_frozen(frozen: Callable[[str, str], None]) -> None:
    module = pytest.importorskip("shoal.torch")
    frozen("shoal.torch.txt", "\n".join(public(module)))


def test_both_have_few_names() -> None:
    import shoal.torch

    assert len(public(shoal)) <= MOST
    assert len(public(shoal.torch)) <= MOST


def test_every_exported_name_exists() -> None:
    import shoal.torch

    for module in (shoal, shoal.torch):
        for name in public(module):
            assert hasattr(module, name), f"{module.__name__} exports {name}, which it does not have"


def test_import_shoal_loads_no_framework_and_no_server() -> None:
    code = (
        "import sys, shoal; print([m for m in ('torch', 'numpy', 'starlette', 'uvicorn', 'rich') if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.strip() == "[]"


def test_the_names_of_a_run_are_frozen(frozen: Callable[[str, str], None]) -> None:
    import shoal.torch

    frozen("run.txt", "\n".join(name for name in sorted(dir(shoal.torch.Run)) if not name.startswith("_")))
