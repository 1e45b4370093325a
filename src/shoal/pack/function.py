"""Function of a pack: by its name if members can import it, otherwise pickled by value and signed.

This module holds the only `pickle.loads` in Shoal; the folder's docstring says why it is safe.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.errors import NotShippable, PackDamaged
from shoal.pack import manifest
from shoal.pack.manifest import PackedFunction, PackManifest


def put(directory: Path, function: Callable[[], Any]) -> PackedFunction:
    """Store a function in a pack; raise NotShippable if it can be neither imported nor pickled."""
    if not callable(function):
        raise NotShippable(f"{function!r} is not a function", do="pass a function that returns a shoal.Experiment")
    name = getattr(function, "__qualname__", type(function).__name__)
    module = importable(function)
    if module:
        return PackedFunction(name, module=module)
    pickled = manifest.put_bytes(directory, _pickle(function, name))
    return PackedFunction(name, pickled=pickled, python=_python_version())


def importable(function: Callable[..., Any]) -> str:
    """Return the module from which another process can import this function, or "" if there is none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module in ("__main__", "__mp_main__") or "<" in name or module not in sys.modules:
        return ""
    try:
        attribute = _get_attribute(sys.modules[module], name)
        spec = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], search_path())
    except (AttributeError, ValueError):
        return ""
    return str(module) if attribute is function and spec is not None else ""


def search_path() -> list[str]:
    """Return this process's module search path as absolute paths, so that it is valid in any directory."""
    return [os.path.abspath(entry) for entry in sys.path if os.path.exists(entry or ".")]


def load(directory: Path, contents: PackManifest, *, remote: bool = False) -> Callable[[], Any]:
    """Return the function of a pack whose manifest was verified, after extending `sys.path`.

    On a `remote` machine, which does not see the sender's disk, its modules come from the pack.
    """
    if remote:
        # Before installed packages, which may be of other versions; after entry 0, the directory of the run itself.
        sys.path[1:1] = [os.path.abspath(entry) for entry in (str(directory / manifest.MODULES), *contents.near)]
    else:
        sys.path.extend(entry for entry in contents.search if entry not in sys.path)
    packed = contents.function
    if packed.pickled:
        _check_python_version(packed)
        return _unpickle(manifest.get_bytes(directory, packed.pickled), packed.name)
    try:
        function: Callable[[], Any] = _get_attribute(importlib.import_module(packed.module), packed.name)
    except AttributeError as error:
        raise PackDamaged(
            f"function {packed.name} no longer exists in {packed.module}",
            where=str(getattr(sys.modules.get(packed.module), "__file__", packed.module)),
            why=str(error),
            do="start the run again with the present version of the module",
        ) from error
    return function


def _python_version() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _check_python_version(function: PackedFunction) -> None:
    """Raise NotShippable for a pickle of another Python version: its bytecode would crash rather than fail cleanly."""
    if function.python != _python_version():
        raise NotShippable(
            f"{function.name} cannot be loaded by a member",
            why=f"it was pickled by Python {function.python}, but this member runs Python {_python_version()}",
            do=f"name a Python {function.python} as python of the pool, or put the function into a module",
        )


def _get_attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _pickle(function: Callable[..., Any], name: str) -> bytes:
    try:
        import cloudpickle
    except ImportError as error:
        raise NotShippable(
            f"{name} cannot be sent to members by its name",
            why="it was defined in a notebook, in the script itself or inside another function",
            do="pip install 'shoal-train[notebook]', or put it into a module",
        ) from error
    try:
        data: bytes = cloudpickle.dumps(function)
    except (pickle.PicklingError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
        raise NotShippable(
            f"{name} cannot be sent to members",
            why=f"it refers to an object that cannot be pickled: {error}",
            do="create such objects inside the function, or put it into a module",
        ) from error
    return data


def _unpickle(data: bytes, name: str) -> Callable[[], Any]:
    """Load a pickle that the starter of this run has signed; the starter may run any code here anyway."""
    try:
        function: Callable[[], Any] = pickle.loads(data)
    except (ImportError, AttributeError) as error:
        raise NotShippable(
            f"{name} cannot be loaded by a member",
            why=str(error),
            do="install that module where members run, or pass it with files=",
        ) from error
    return function
