"""Folder of wheels for tests without a network: each wheel stands for a distribution that is installed here.

A wheel holds nothing but its name, its version, and a path to the installed files, so that making and installing it
costs nothing. It works only on this machine, with the same version of Python.
"""

from __future__ import annotations

import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from shoal.pack.environments import wheel


def fill(folder: Path, *more: str) -> Path:
    """Add wheels of all requirements of Shoal, and of `more` distributions; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*_requirements("shoal-train"), *more}:
        add(folder, name, importlib.metadata.version(name), {})
    return folder


def add(folder: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    """Add a wheel of these files; without files, one that refers to what is installed here."""
    contents = files or {f"{_module(name)}_here.pth": f"{sysconfig.get_path('purelib')}\n".encode()}
    metadata = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    path, data = wheel.build_wheel(_module(name), metadata, contents)
    (folder / path).write_bytes(data)


def _requirements(name: str) -> Iterable[str]:
    for text in importlib.metadata.requires(name) or ():
        if "extra ==" not in text:
            yield re.match(r"[\w.-]+", text)[0]  # type: ignore[index]


def _module(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
