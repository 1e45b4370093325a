"""Manifest of a pack: what it contains, signed with the token of its run.

A pack is a directory::

    manifest.json   names of the function, files and modules, with the SHA-256 of each
    manifest.hmac   signature of manifest.json under the run's token
    blobs/HASH      contents, each stored once
    modules/        on machines that do not see this disk only: modules that cannot be imported there

On such machines the pack is in the working directory, in a folder of its own (`REMOTE_FOLDER`). The signature covers
the manifest and the manifest covers the blobs, so no part of a pack can be replaced without the token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import msgspec

from shoal.errors import PackDamaged

MANIFEST, SIGNATURE, BLOBS, MODULES = "manifest.json", "manifest.hmac", "blobs", "modules"
REMOTE_FOLDER = ".shoal-pack"
_PURPOSE = b"shoal pack 1\n"
_CHUNK_BYTES = 1 << 20


class PackedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Function by module and name, or by the hash of its pickle, which only the Python version `python` can load."""

    name: str
    module: str = ""
    pickled: str = ""
    python: str = ""


class PackManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a pack: `files` maps names to hashes, `search` is the module search path of its sender.

    Machines that do not see the sender's disk use `modules` (names to hashes) and `near` instead: the entries of the
    search path inside the project, relative to its directory.
    """

    function: PackedFunction
    files: dict[str, str] = {}
    search: tuple[str, ...] = ()
    modules: dict[str, str] = {}
    near: tuple[str, ...] = ()


def write(directory: Path, manifest: PackManifest, token: str) -> None:
    """Write the manifest and its signature into a pack."""
    data = msgspec.json.encode(manifest)
    (directory / MANIFEST).write_bytes(data)
    (directory / SIGNATURE).write_text(_signature(data, token), "ascii")


def read(directory: Path, token: str) -> PackManifest:
    """Return the manifest of a pack; raise PackDamaged unless `token` signed it."""
    try:
        data = (directory / MANIFEST).read_bytes()
        signature = (directory / SIGNATURE).read_bytes()
    except OSError as error:
        raise PackDamaged("the pack of this run cannot be read", where=str(directory), why=str(error)) from error
    if not hmac.compare_digest(signature.strip(), _signature(data, token).encode()):
        raise PackDamaged(
            "the pack of this run was not signed with its token",
            where=str(directory / MANIFEST),
            why="it was modified after shoal.run wrote it, or the token belongs to another run",
            do="start the run again, and check who can write to that directory",
        )
    try:
        return msgspec.json.decode(data, type=PackManifest)
    except (ValueError, RecursionError) as error:
        raise PackDamaged(
            "the pack of this run was written by another version", where=str(directory), why=str(error)
        ) from error


def put_bytes(directory: Path, data: bytes) -> str:
    """Store bytes in a pack; return their hash."""
    digest = hashlib.sha256(data).hexdigest()
    part = _new_part(directory)
    part.write_bytes(data)
    _publish(part, digest)
    return digest


def put_file(directory: Path, source: Path) -> str:
    """Store the contents of a file in a pack; return their hash; raise OSError."""
    part = _new_part(directory)
    digest = hashlib.sha256()
    with source.open("rb") as reader, part.open("wb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
    _publish(part, digest.hexdigest())
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's contents; raise OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def get_bytes(directory: Path, digest: str) -> bytes:
    """Return the blob with this hash; raise PackDamaged if it is missing or its contents do not match."""
    path = directory / BLOBS / digest
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PackDamaged("a blob of the pack is missing", where=str(path), why=str(error)) from error
    if not hmac.compare_digest(hashlib.sha256(data).hexdigest(), digest):
        raise PackDamaged(
            "a blob of the pack does not match its hash",
            where=str(path),
            why="it was modified after shoal.run wrote it",
            do="start the run again, and check who can write to that directory",
        )
    return data


def _new_part(directory: Path) -> Path:
    blobs = directory / BLOBS
    blobs.mkdir(parents=True, exist_ok=True, mode=0o700)
    return blobs / f"{os.getpid()}.part"


def _publish(part: Path, digest: str) -> None:
    """Make a finished blob visible under its hash, read-only."""
    os.chmod(part, 0o400)
    os.replace(part, part.with_name(digest))


def _signature(data: bytes, token: str) -> str:
    return hmac.new(token.encode(), _PURPOSE + data, hashlib.sha256).hexdigest()
