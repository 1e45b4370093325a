"""Token store: the coordinator's own token, which agents and members have too, and one for each named user."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from shoal.errors import BadCredentials
from shoal.wire import credentials

FOLDER = "tokens"
OWNER = ""
REREAD_S = 1.0


class TokenStore:
    """The tokens that a coordinator accepts; token files that are added or removed take effect within a second."""

    def __init__(self, directory: Path, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = directory / FOLDER, clock
        self._owner = _digest(f"Bearer {token}".encode())
        self._users: dict[bytes, str] = {}
        self._read_at = -REREAD_S

    def user_of(self, header: bytes) -> str | None:
        """Return the user whose token an Authorization header holds: OWNER, a name, or None for no valid token."""
        # Hashes are compared, so that the time it takes tells nothing about the token.
        digest = _digest(header)
        if digest == self._owner:
            return OWNER
        self._reread()
        return self._users.get(digest)

    def _reread(self) -> None:
        if self._clock() - self._read_at < REREAD_S:
            return
        self._read_at = self._clock()
        users = {}
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            try:
                users[_digest(f"Bearer {credentials.read(path).token}".encode())] = path.name
            except BadCredentials:
                continue  # being written, or not a token file
        self._users = users


def _digest(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()
