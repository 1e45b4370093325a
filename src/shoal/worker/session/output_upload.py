"""Upload of saved files from a machine that does not share a disk with the one that started the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

from shoal.errors import OutputUploadFailed
from shoal.store.blob_store import SCHEME, Store, open_store
from shoal.worker.session.environment import MemberEnvironment

FOLDER = "outputs"
_CHUNK_BYTES = 1 << 20


def upload_output(environment: MemberEnvironment | None, path: str) -> None:
    """Send a file that was just written to the coordinator, if this machine does not share the user's disk.

    A file outside of the member's start directory was meant for this machine and stays here.
    """
    if environment is None or not environment.upload_dir:
        return
    name = name_below(path, environment.upload_dir)
    if name is None:
        sys.stderr.write(
            f"shoal: {environment.member}: {path} is outside of the run's directory and stays on this machine\n"
        )
        return
    store = open_store(f"{SCHEME}{environment.run}/{FOLDER}", environment.access)
    upload(store, name, path, environment.member)


def name_below(path: str, directory: str) -> str | None:
    """Return the name of a file relative to a directory, or None if it is not below it."""
    full, above = os.path.realpath(path), os.path.realpath(directory)
    if os.path.commonpath([full, above]) != above or full == above:
        return None
    return PurePosixPath(os.path.relpath(full, above)).as_posix()


def upload(store: Store, name: str, path: str, member: str) -> None:
    """Put a file into a store; raise OutputUploadFailed with the place of the local copy if that fails."""
    try:
        store.put(name, _chunks(path))
    except OSError as error:
        raise OutputUploadFailed(
            f"{name} was saved on its machine, but the upload failed",
            where=f"{os.path.abspath(path)} on the machine of {member}",
            why=str(error),
            do="copy it from there; check that the coordinator runs and that its disk is not full",
        ) from error


def _chunks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
