"""Where coordinators are looked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LOCAL = "local"


@dataclass(frozen=True, slots=True)
class CoordinatorTarget:
    """Which coordinators are looked at: one by its URL, or all of SHOAL_HOME."""

    home: Path
    url: str = ""
    token_file: str = ""


def home() -> Path:
    """Shoal's own directory; members, which may work elsewhere, are told of places below it."""
    return Path(os.environ.get("SHOAL_HOME") or Path.home() / ".shoal").absolute()
