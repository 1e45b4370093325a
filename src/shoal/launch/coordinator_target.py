"""The coordinators that a command addresses: one by its URL, or all below SHOAL_HOME."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError

LOCAL = "local"


@dataclass(frozen=True, slots=True)
class CoordinatorTarget:
    """The coordinator at `url`, or, if that is empty, every coordinator with a directory below `home`."""

    home: Path
    url: str = ""
    token_file: str = ""

    @property
    def options(self) -> str:
        """The options that address the same coordinator in another command, with a leading space; empty if none."""
        options = (("--url", self.url), ("--token-file", self.token_file)) if self.url else ()
        return "".join(f" {option} {shlex.quote(value)}" for option, value in options if value)


def home() -> Path:
    """Return Shoal's own directory as an absolute path, because members may work in another directory.

    Raise UsageError if there is none: containers may run as a user that the system does not know.
    """
    try:
        return Path(os.environ.get("SHOAL_HOME") or Path.home() / ".shoal").absolute()
    except RuntimeError as error:
        raise UsageError(
            "no home directory for the files of runs",
            why=f"HOME is not set, and the system has no user with the id {os.getuid()}",
            do="set SHOAL_HOME to a directory that you may write to",
        ) from error


def token_file_of_environment() -> str:
    """Return the user's token file as SHOAL_TOKEN_FILE names it, empty if it names none."""
    return os.environ.get("SHOAL_TOKEN_FILE", "")
