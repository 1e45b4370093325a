"""Names of notice sources, as `notice.source` and the agent's `--notice-source` give them.

::

    source = "aws" / "aws:rebalance" / "gcp" / "azure"
           / "slurm" / "slurm:" seconds
           / "file:" path
           / name of an installed plug-in
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable

from shoal.errors import BadNoticeSource

CLOUDS = ("aws", "aws:rebalance", "gcp", "azure")
SLURM, FILE = "slurm", "file"
ALL = "aws, aws:rebalance, gcp, azure, slurm, slurm:SECONDS or file:PATH"


def check(name: str, plug_ins: Callable[[], Iterable[str]], where: str = "") -> None:
    """Raise `BadNoticeSource` if no source has this name; `plug_ins` returns the names of the installed ones."""
    kind, colon, rest = name.partition(":")
    if not name or name in CLOUDS or name == SLURM or (kind == FILE and rest):
        return
    if kind == SLURM and colon:
        if not _is_seconds(rest):
            what = f"invalid notice source {name:.200} — not a number of seconds"
            raise BadNoticeSource(what, where=where, do="use slurm:60")
        return
    names = sorted(plug_ins())
    if name in names:
        return
    if kind == FILE:
        what = "the notice source file needs the path of the file to watch"
        raise BadNoticeSource(what, where=where, do="use file:/run/shutdown-notice, for example")
    near = difflib.get_close_matches(name.lower(), [*CLOUDS, SLURM, *names], n=1)
    raise BadNoticeSource(
        f"unknown notice source {name!r:.200}",
        where=where,
        why="" if near else f"it is none of {ALL}, and no plug-in of that name is installed here",
        do=f"did you mean {near[0]}?" if near else "use one of these, or install its plug-in on this machine too",
    )


def _is_seconds(text: str) -> bool:
    try:
        return 0.0 < float(text) < math.inf
    except ValueError:
        return False
