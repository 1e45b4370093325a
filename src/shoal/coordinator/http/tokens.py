"""Who holds which token: the coordinator's own, which agents and members have too, and one for each named user."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from shoal.errors import BadCredentials
from shoal.wire import credentials

FOLDER = "tokens"
OWNER = ""
LOOK_S = 1.0


class TokenStore:
    """The tokens that a coordinator accepts; files that come or go in its folder of tokens are noticed."""

    def __init__(self, directory: Path, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = directory / FOLDER, clock
        self._own = _digest(f"Bearer {token}".encode())
        self._users: dict[bytes, str] = {}
        self._looked_at = -LOOK_S

    def who(self, header: bytes) -> str | None:
        """The user whose token this is, OWNER if it is the coordinator's own, None if it is nobody's."""
        # Hashes are compared, so that how long it takes says nothing of the token.
        digest = _digest(header)
        if digest == self._own:
            return OWNER
        self._look()
        return self._users.get(digest)

    def _look(self) -> None:
        if self._clock() - self._looked_at < LOOK_S:
            return
        self._looked_at = self._clock()
        found = {}
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            try:
                found[_digest(f"Bearer {credentials.read(path).token}".encode())] = path.name
            except BadCredentials:
                continue  # half written, or not one of ours
        self._users = found


def _digest(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()
