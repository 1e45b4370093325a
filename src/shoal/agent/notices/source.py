"""Notice sources: where an agent learns that its machine will be taken away.

A machine that is lost without warning costs the step that it was in. With a warning of seconds, its members hand over
their state, leave between two steps, and nothing is lost. Every platform has its own way to warn:

==========================  =============================================  ========================================
source                      how it warns                                   time left
==========================  =============================================  ========================================
`aws`, `aws:rebalance`      metadata service, polled                       two minutes; with `rebalance` often more
`gcp`                       metadata service, polled                       about 30 seconds
`azure`                     scheduled events, polled                       30 seconds, or what the event says
`slurm`, `slurm:SECONDS`    SIGUSR1 to the batch script, and the limit     what squeue says of the job's end
`file:PATH`                 a file that a script creates                   what the file says, or 30 seconds
a plug-in                   entry point `shoal.notice_sources`             up to the plug-in
==========================  =============================================  ========================================

A source is chosen by name: by the setting `notice.source`, which agents get as `--notice-source`. Nothing is guessed,
because a request to a metadata service that does not exist may hang or reach a stranger.

Deadlines. A `Notice` says in how many seconds the machine goes away, counted from when it is yielded. A cloud states a
point in time, which is converted by this machine's clock; one that lies in the past means now, 0 s. The same warning is
repeated at every poll, so each notice has a `key`, and only a new key is yielded: a changed deadline is a new notice.

What happens with a notice: the agent reports it to the coordinator, which lets the members of this machine leave after
the current step and requests replacements. If the coordinator cannot be reached, the agent sends its members SIGTERM
itself. SIGTERM to the agent has the same effect as a notice with the agent's grace period.

Failures. A source that does not answer, or answers nonsense, is no notice: it is logged once, and polled again. A false
alarm would cost a machine, and a missed one only what was lost before notices existed.

A plug-in is a function that takes the base URL (or "") and returns a `NoticeSource`.

To add a source, write a class with `poll` (a cloud's in `cloud`), a case in `open_source` and its name in
`core/notice_source`. The names of all sources are also in the table above, in the help of the setting
(`shoal.settings`) and of the agent (`agent/__main__`), in the error `BadNoticeSource`, and in docs/howto/notices.md. A
cloud's replies go to the end of `CLOUDS` in tests/process/agent/test_notice_sources.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http.client import HTTPException
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from shoal.core import notice_source
from shoal.settings import NOTICE_ENTRY_POINTS

log = logging.getLogger("shoal.agent")

_FILE_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Notice:
    """Warning that the machine goes away in `within_s` seconds; `key` distinguishes it from other notices."""

    within_s: float
    source: str
    detail: str
    key: str


class NoticeSource(Protocol):
    """Source that yields each notice once, for as long as it is iterated."""

    def notices(self) -> AsyncIterator[Notice]: ...


def open_source(name: str, url: str = "", poll_s: float = 5.0, timeout_s: float = 3.0) -> NoticeSource:
    """Return the source of this name; `url` replaces the cloud's usual address. Raise `BadNoticeSource`."""
    # Imported late, because these modules import `Notice` from here.
    from shoal.agent.notices import cloud, file, slurm

    plug_ins = {entry.name: entry for entry in entry_points(group=NOTICE_ENTRY_POINTS)}
    notice_source.check(name, lambda: plug_ins)
    kind, _, rest = name.partition(":")
    client = cloud.MetadataClient(url, timeout_s)
    match kind:
        case "aws":
            return PollingSource(cloud.Aws(client, with_rebalance=rest == "rebalance").poll, poll_s)
        case "gcp":
            return PollingSource(cloud.Gcp(client).poll, poll_s)
        case "azure":
            return PollingSource(cloud.Azure(client).poll, poll_s)
        case "file":
            return PollingSource(file.FileSource(Path(rest)).poll, min(poll_s, _FILE_POLL_S))
        case "slurm":
            return slurm.slurm_job(rest, os.environ)
    source: NoticeSource = plug_ins[name].load()(url)
    return source


class PollingSource:
    """Source that polls every `every_s` seconds; errors are logged once each and count as no notice."""

    def __init__(self, poll: Callable[[], Notice | None], every_s: float) -> None:
        self._poll = poll
        self._every_s = every_s

    async def notices(self) -> AsyncIterator[Notice]:
        last_key = ""
        last_error = ""
        while True:
            try:
                notice = await asyncio.to_thread(self._poll)
                last_error = ""
            except (OSError, HTTPException, ValueError) as error:
                notice = None
                if last_error != str(error):
                    last_error = str(error)
                    log.warning("cannot read the notice source: %s", last_error)
            if notice is not None and notice.key != last_key:
                last_key = notice.key
                yield notice
            await asyncio.sleep(self._every_s)
