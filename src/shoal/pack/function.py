"""How a function gets to the members: by its name if they can import it, else by value, signed."""

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
    """Keep a function in a pack."""
    if not callable(function):
        raise NotShippable(f"{function!r} is not a function", do="pass a function that returns a shoal.Experiment")
    name = getattr(function, "__qualname__", type(function).__name__)
    module = importable(function)
    if module:
        return PackedFunction(name, module=module)
    return PackedFunction(name, pickled=manifest.put_bytes(directory, _pickled(function, name)), python=_python())


def importable(function: Callable[..., Any]) -> str:
    """The module that another process finds this function in, empty if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module in ("__main__", "__mp_main__") or "<" in name or module not in sys.modules:
        return ""
    try:
        found = _within(sys.modules[module], name)
        spec = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], search_path())
    except (AttributeError, ValueError):
        return ""
    return str(module) if found is function and spec is not None else ""


def search_path() -> list[str]:
    """Where this process looks for modules, in words that another process in another directory understands."""
    return [os.path.abspath(place) for place in sys.path if os.path.exists(place or ".")]


def load(directory: Path, contents: PackManifest, *, remote: bool = False) -> Callable[[], Any]:
    """The function of a pack whose manifest was checked; `apart` from the disk of who made it, with its modules."""
    if remote:
        # Before what is installed here, which may be another version; after what the run itself put in the way.
        sys.path[1:1] = [os.path.abspath(place) for place in (str(directory / manifest.MODULES), *contents.near)]
    else:
        sys.path.extend(place for place in contents.search if place not in sys.path)
    function = contents.function
    if function.pickled:
        _check_python(function)
        return _unpickled(manifest.get_bytes(directory, function.pickled), function.name)
    try:
        found: Callable[[], Any] = _within(importlib.import_module(function.module), function.name)
    except AttributeError as error:
        raise PackDamaged(
            f"there is no function {function.name} in {function.module} any more",
            where=str(getattr(sys.modules.get(function.module), "__file__", function.module)),
            why=str(error),
            do="start the run again from the module as it is now",
        ) from error
    return found


def _python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _check_python(function: PackedFunction) -> None:
    """Its code was compiled: another Python would misread it, and crash rather than complain."""
    if function.python != _python():
        raise NotShippable(
            f"{function.name} cannot be loaded by a member",
            why=f"it was sent by Python {function.python}, and members there run in Python {_python()}",
            do=f"name a Python {function.python} as python of the pool, or put the function into a module",
        )


def _within(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _pickled(function: Callable[..., Any], name: str) -> bytes:
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
            why=f"it refers to something that cannot be pickled: {error}",
            do="make such things inside the function, or put it into a module",
        ) from error
    return data


def _unpickled(data: bytes, name: str) -> Callable[[], Any]:
    """`data` was signed by who started this run, who may run any code here anyway."""
    try:
        found: Callable[[], Any] = pickle.loads(data)
    except (ImportError, AttributeError) as error:
        raise NotShippable(
            f"{name} cannot be loaded by a member",
            why=str(error),
            do="install that module where members run, or pass it with files=",
        ) from error
    return found
