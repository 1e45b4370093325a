"""What a member saves, on its way back to who started the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

from shoal.errors import OutputUploadFailed
from shoal.store.blob_store import SCHEME, Store, open_store
from shoal.worker.session.environment import MemberEnvironment

FOLDER = "outputs"
_PIECE_BYTES = 1 << 20


def bring_back(told: MemberEnvironment | None, path: str) -> None:
    """Send a file that was just written to the coordinator, if this machine does not share a disk with the user's.

    What is outside of the directory that the member was started in was meant for a place on this machine, and stays.
    """
    if told is None or not told.apart:
        return
    name = name_below(path, told.apart)
    if name is None:
        sys.stderr.write(f"shoal: {told.member}: {path} is outside of the run's directory, and stays on this machine\n")
        return
    send(open_store(f"{SCHEME}{told.run}/{FOLDER}", told.access), name, path, told.member)


def name_below(path: str, directory: str) -> str | None:
    """What a file is called below a directory, None if it is not there."""
    full, above = os.path.realpath(path), os.path.realpath(directory)
    if os.path.commonpath([full, above]) != above or full == above:
        return None
    return PurePosixPath(os.path.relpath(full, above)).as_posix()


def send(store: Store, name: str, path: str, member: str) -> None:
    """Put a file into a store; what could not be sent is still where it is."""
    try:
        store.put(name, _pieces(path))
    except OSError as error:
        raise OutputUploadFailed(
            f"{name} was saved, but could not be brought back",
            where=f"{os.path.abspath(path)} on the machine of {member}",
            why=str(error),
            do="copy it from there; see that the coordinator runs, and that its disk is not full",
        ) from error


def _pieces(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
