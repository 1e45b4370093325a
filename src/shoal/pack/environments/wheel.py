"""Wheels of Shoal and pip, built from the installed files.

This needs neither network nor build tools. The same files give the same bytes (fixed timestamps, sorted entries), so
the hash of a wheel changes only with its contents, and machines keep their cached environments.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import shoal
from shoal.errors import BadEnvironment

EPOCH = (1980, 1, 1, 0, 0, 0)
WHEEL = "Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_KEPT = ("METADATA", "entry_points.txt", "top_level.txt")


def build_shoal_wheel() -> tuple[str, bytes]:
    """Return the file name and contents of a wheel of this Shoal; raise BadEnvironment if it is not installed."""
    folder = Path(shoal.__file__).parent
    files = {
        f"shoal/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    metadata = _metadata("shoal-train")
    if not metadata:
        raise BadEnvironment(
            "Shoal cannot be sent to other machines",
            where=str(folder),
            why="it is not installed here, so its dependencies are unknown",
            do="install it with pip, or remove environment from the pool",
        )
    return build_wheel("shoal_train", metadata, files)


def build_pip_wheel() -> tuple[str, bytes] | None:
    """Return the file name and contents of a wheel of pip, or None if it is not installed here.

    Many machines have Python without pip.
    """
    metadata = _metadata("pip")
    listed = importlib.metadata.files("pip") if metadata else None
    files = {
        str(file): Path(str(file.locate())).read_bytes()
        for file in listed or ()
        if file.parts[0] == "pip" and file.suffix != ".pyc" and Path(str(file.locate())).is_file()
    }
    return build_wheel("pip", metadata, files) if files else None


def build_wheel(name: str, metadata: Mapping[str, str], files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Return the file name and contents of a pure-Python wheel; `metadata` maps names in .dist-info to texts."""
    version = _version(metadata["METADATA"])
    dist_info = f"{name}-{version}.dist-info"
    contents = {**files, **{f"{dist_info}/{file}": text.encode() for file, text in metadata.items()}}
    contents[f"{dist_info}/WHEEL"] = WHEEL.encode()
    contents = dict(sorted(contents.items()))
    record = [f"{path},sha256={_hash(data)},{len(data)}" for path, data in contents.items()]
    contents[f"{dist_info}/RECORD"] = ("\n".join([*record, f"{dist_info}/RECORD,,"]) + "\n").encode()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in contents.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return f"{name}-{version}-py3-none-any.whl", wheel.getvalue()


def _metadata(name: str) -> dict[str, str]:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return {}
    texts = {file: distribution.read_text(file) for file in _KEPT}
    return {file: text for file, text in texts.items() if text}


def _version(metadata: str) -> str:
    return next(line.partition(": ")[2].strip() for line in metadata.splitlines() if line.startswith("Version: "))


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
