"""Modules of the user's own that a process has imported: they travel to machines that could not import them."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from shoal.pack import project

OURS = ("shoal", "__main__", "__mp_main__")
_INSTALLED = ("site-packages", "dist-packages")


def find_user_modules(loaded: Mapping[str, ModuleType], sent: Collection[Path] = ()) -> dict[str, Path]:
    """The files of such modules, by where they belong below a directory that modules are looked for in.

    A package goes as a whole. What is installed, or comes with Python, is not the user's own; what is `sent` anyway
    need not go twice.
    """
    found: dict[str, Path] = {}
    for name, module in sorted(loaded.items()):
        file = _source(module)
        top = name.partition(".")[0]
        if file is None or top in OURS or top in sys.stdlib_module_names or file in sent or _is_installed(file):
            continue
        outer = _source(loaded.get(top))
        if "." not in name or outer is None:
            found |= dict(_files(name, file))
    return found


def inside_project(places: Collection[str], root: Path) -> tuple[str, ...]:
    """Those places that are below a directory, as they are called there."""
    return tuple(os.path.relpath(place, root) for place in places if Path(place).is_relative_to(root))


def _files(name: str, file: Path) -> Iterator[tuple[str, Path]]:
    """The files of one module: of a package, all that it has."""
    where = "/".join(name.split("."))
    if file.name != "__init__.py":
        yield f"{where}{file.suffix}", file
        return
    for below in project.walk(file.parent):
        yield f"{where}/{below}", file.parent / below


def _source(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    path = Path(file) if isinstance(file, str) else None
    return path.absolute() if path is not None and path.suffix == ".py" and path.is_file() else None


def _is_installed(file: Path) -> bool:
    places = sysconfig.get_paths()
    with_python = [places[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(part in _INSTALLED for part in file.parts) or any(file.is_relative_to(place) for place in with_python)
