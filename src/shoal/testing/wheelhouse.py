"""A folder of wheels for machines without a network: each stands for something that is installed here.

A wheel holds nothing but its name, its version, and where it is installed, so that making and installing it costs
nothing; it serves only on this machine, with the same version of Python.
"""

from __future__ import annotations

import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from shoal.pack.environments import wheel


def fill(folder: Path, *more: str) -> Path:
    """All that Shoal needs, and more if it is named."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*_needs("shoal-train"), *more}:
        add(folder, name, importlib.metadata.version(name), {})
    return folder


def add(folder: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    """A wheel of these files, or of what is installed here if there are none."""
    found = files or {f"{_module(name)}_here.pth": f"{sysconfig.get_path('purelib')}\n".encode()}
    metadata = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    path, data = wheel.pack(_module(name), metadata, found)
    (folder / path).write_bytes(data)


def _needs(name: str) -> Iterable[str]:
    for text in importlib.metadata.requires(name) or ():
        if "extra ==" not in text:
            yield re.match(r"[\w.-]+", text)[0]  # type: ignore[index]


def _module(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
