"""Wheels made out of what is installed here: without network, without what built them, the same bytes every time."""

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
    """The file name and contents of a wheel of the Shoal that runs here."""
    folder = Path(shoal.__file__).parent
    files = {
        f"shoal/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = _metadata("shoal-train")
    if not found:
        raise BadEnvironment(
            "Shoal cannot be sent along",
            where=str(folder),
            why="it is not installed here, so that nobody knows what it needs",
            do="pip install it, or leave environment out of the pool",
        )
    return build_wheel("shoal_train", found, files)


def build_pip_wheel() -> tuple[str, bytes] | None:
    """The same of pip, if it is here: many machines have Python without it."""
    found = _metadata("pip")
    listed = importlib.metadata.files("pip") if found else None
    files = {
        str(one): Path(str(one.locate())).read_bytes()
        for one in listed or ()
        if one.parts[0] == "pip" and one.suffix != ".pyc" and Path(str(one.locate())).is_file()
    }
    return build_wheel("pip", found, files) if files else None


def build_wheel(name: str, metadata: Mapping[str, str], files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """A wheel of pure Python; `metadata` are the texts of its .dist-info."""
    version = _version(metadata["METADATA"])
    about = f"{name}-{version}.dist-info"
    contents = {**files, **{f"{about}/{one}": text.encode() for one, text in metadata.items()}}
    contents[f"{about}/WHEEL"] = WHEEL.encode()
    contents = dict(sorted(contents.items()))
    record = [f"{path},sha256={_hash(data)},{len(data)}" for path, data in contents.items()]
    contents[f"{about}/RECORD"] = ("\n".join([*record, f"{about}/RECORD,,"]) + "\n").encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in contents.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return f"{name}-{version}-py3-none-any.whl", made.getvalue()


def _metadata(name: str) -> dict[str, str]:
    try:
        known = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return {}
    texts = {one: known.read_text(one) for one in _KEPT}
    return {one: text for one, text in texts.items() if text}


def _version(metadata: str) -> str:
    return next(line.partition(": ")[2].strip() for line in metadata.splitlines() if line.startswith("Version: "))


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
