"""Modules of the user that are not installed: found among the imported ones, and sent to machines that lack them."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from shoal.pack import project

NEVER_SENT = ("shoal", "__main__", "__mp_main__")
_INSTALLED = ("site-packages", "dist-packages")


def find_user_modules(loaded: Mapping[str, ModuleType], sent: Collection[Path] = ()) -> dict[str, Path]:
    """Return the files of the user's own modules, by their path relative to an entry of the module search path.

    A package is sent as a whole. Installed packages and the standard library are skipped, and so are modules whose
    file is in `sent`, because it travels with the project.
    """
    files: dict[str, Path] = {}
    for name, module in sorted(loaded.items()):
        file = _source(module)
        top = name.partition(".")[0]
        if file is None or top in NEVER_SENT or top in sys.stdlib_module_names or file in sent or _is_installed(file):
            continue
        outer = _source(loaded.get(top))
        if "." not in name or outer is None:
            files |= dict(_files(name, file))
    return files


def inside_project(search_path: Collection[str], root: Path) -> tuple[str, ...]:
    """Return the entries of a search path that are inside `root`, relative to it."""
    return tuple(os.path.relpath(entry, root) for entry in search_path if Path(entry).is_relative_to(root))


def _files(name: str, file: Path) -> Iterator[tuple[str, Path]]:
    """Yield the file of a module, or all files of a package, with their relative paths."""
    base = "/".join(name.split("."))
    if file.name != "__init__.py":
        yield f"{base}{file.suffix}", file
        return
    for inner in project.walk(file.parent):
        yield f"{base}/{inner}", file.parent / inner


def _source(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    path = Path(file) if isinstance(file, str) else None
    return path.absolute() if path is not None and path.suffix == ".py" and path.is_file() else None


def _is_installed(file: Path) -> bool:
    paths = sysconfig.get_paths()
    python_dirs = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(part in _INSTALLED for part in file.parts) or any(file.is_relative_to(path) for path in python_dirs)
