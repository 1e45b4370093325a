"""What is in a pack, signed with the token of its run.

A pack is a directory::

    manifest.json   the names of all that is in it, and the hash of what each holds
    manifest.hmac   what the run's token signs it with
    blobs/HASH      what they hold, once each
    modules/        on machines that do not see it, modules that cannot be imported there

On such machines it is in the working directory, under a name of its own.
The signature covers the manifest and the manifest covers the blobs, so that nothing of a pack can be exchanged by
somebody who does not have the token.
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
_PIECE_BYTES = 1 << 20


class PackedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function by its module and name, or by the hash of its pickle, which only the same `python` understands."""

    name: str
    module: str = ""
    pickled: str = ""
    python: str = ""


class PackManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`files` maps names to hashes; `search` is where the modules of who made the pack are looked for.

    On machines that do not see these places `modules`, by hash too, are in a folder of the pack, and `near` is what
    stands there for those places that were below the project's directory.
    """

    function: PackedFunction
    files: dict[str, str] = {}
    search: tuple[str, ...] = ()
    modules: dict[str, str] = {}
    near: tuple[str, ...] = ()


def write(directory: Path, manifest: PackManifest, token: str) -> None:
    """Put the manifest with its signature beside the blobs."""
    data = msgspec.json.encode(manifest)
    (directory / MANIFEST).write_bytes(data)
    (directory / SIGNATURE).write_text(_signature(data, token), "ascii")


def read(directory: Path, token: str) -> PackManifest:
    """The manifest, if the run's token has signed it."""
    try:
        data = (directory / MANIFEST).read_bytes()
        signature = (directory / SIGNATURE).read_bytes()
    except OSError as error:
        raise PackDamaged("the pack of this run cannot be read", where=str(directory), why=str(error)) from error
    if not hmac.compare_digest(signature.strip(), _signature(data, token).encode()):
        raise PackDamaged(
            "the pack of this run was not signed with its token",
            where=str(directory / MANIFEST),
            why="somebody changed it after shoal.run wrote it, or the token is another run's",
            do="start the run again; see who can write to that directory",
        )
    try:
        return msgspec.json.decode(data, type=PackManifest)
    except msgspec.DecodeError as error:
        raise PackDamaged("the pack of this run is of another version", where=str(directory), why=str(error)) from error


def put_bytes(directory: Path, data: bytes) -> str:
    """Keep this in the pack; the hash that finds it again."""
    found = hashlib.sha256(data).hexdigest()
    _keep(directory, found, data)
    return found


def put_file(directory: Path, source: Path) -> str:
    """Keep what a file holds in the pack; the hash that finds it again."""
    blobs = directory / BLOBS
    blobs.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = blobs / f"{os.getpid()}.part"
    digest = hashlib.sha256()
    with source.open("rb") as given, part.open("wb") as kept:
        while piece := given.read(_PIECE_BYTES):
            digest.update(piece)
            kept.write(piece)
    os.chmod(part, 0o400)
    os.replace(part, blobs / digest.hexdigest())
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """The hash of what a file holds now."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def get_bytes(directory: Path, wanted: str) -> bytes:
    """What has this hash, and nothing else."""
    path = directory / BLOBS / wanted
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PackDamaged("a part of the pack is missing", where=str(path), why=str(error)) from error
    if not hmac.compare_digest(hashlib.sha256(data).hexdigest(), wanted):
        raise PackDamaged(
            "a part of the pack is not what was put there",
            where=str(path),
            why="it was changed after shoal.run wrote it",
            do="start the run again; see who can write to that directory",
        )
    return data


def _keep(directory: Path, name: str, data: bytes) -> None:
    blobs = directory / BLOBS
    blobs.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = blobs / f"{os.getpid()}.part"
    part.write_bytes(data)
    os.chmod(part, 0o400)
    os.replace(part, blobs / name)


def _signature(data: bytes, token: str) -> str:
    return hmac.new(token.encode(), _PURPOSE + data, hashlib.sha256).hexdigest()
