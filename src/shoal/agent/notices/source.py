"""Where notices come from: clouds that are about to take a machine back, Slurm, and files that scripts leave.

A source is asked for by name; nothing is looked for by itself. Others can be installed under the entry-point group
``shoal.notice_sources``: a function that takes the base URL (or "") and returns a `Source`.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http.client import HTTPException
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol
from urllib import error, request

import msgspec

from shoal.errors import BadNoticeSource

log = logging.getLogger("shoal.agent")

GROUP = "shoal.notice_sources"
_ANSWER_BYTES = 64 << 10
_AWS_TOKEN_S = 21600


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine goes away in `within_s` seconds. `key` tells one notice from the next."""

    within_s: float
    source: str
    detail: str
    key: str


class NoticeSource(Protocol):
    """Yields each notice once, for as long as it is listened to."""

    def notices(self) -> AsyncIterator[Notice]: ...


def source(name: str, url: str = "", poll_s: float = 5.0, timeout_s: float = 3.0) -> NoticeSource:
    """The source of this name; `url` replaces the address that the cloud's machines usually ask."""
    kind, _, rest = name.partition(":")
    web = MetadataClient(url, timeout_s)
    match kind:
        case "aws":
            return PollingSource(Aws(web, also_rebalance=rest == "rebalance").look, poll_s)
        case "gcp":
            return PollingSource(Gcp(web).look, poll_s)
        case "azure":
            return PollingSource(Azure(web).look, poll_s)
        case "file":
            return PollingSource(FileSource(Path(rest)).look, min(poll_s, 0.5))
        case "slurm":
            # Late, because it makes notices of ours.
            from shoal.agent.notices.slurm import slurm_job

            return slurm_job(rest, os.environ)
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            found: NoticeSource = entry.load()(url)
            return found
    raise BadNoticeSource(
        f"there is no source of notices called {name!r}",
        do="use aws, gcp, azure, file:PATH, slurm, or install its plug-in",
    )


class PollingSource:
    """Asks again and again, politely; a source that does not answer is no notice, and said once."""

    def __init__(self, look: Callable[[], Notice | None], every_s: float) -> None:
        self._look = look
        self._every_s = every_s

    async def notices(self) -> AsyncIterator[Notice]:
        told = ""
        trouble = ""
        while True:
            try:
                notice = await asyncio.to_thread(self._look)
                trouble = ""
            except (OSError, HTTPException, ValueError) as problem:
                notice = None
                if trouble != str(problem):
                    trouble = str(problem)
                    log.warning("the source of notices does not answer as it should: %s", trouble)
            if notice is not None and notice.key != told:
                told = notice.key
                yield notice
            await asyncio.sleep(self._every_s)


class MetadataClient:
    """Small requests to a metadata service: bounded in time and size, and never through a proxy."""

    def __init__(self, base: str, timeout_s: float) -> None:
        self._base = base.rstrip("/")
        self._timeout_s = timeout_s
        self._opener = request.build_opener(request.ProxyHandler({}))

    def ask(self, usual: str, path: str, headers: dict[str, str], method: str = "GET") -> str | None:
        """The answer's text; None if there is no such thing (404)."""
        asked = request.Request((self._base or usual) + path, headers=headers, method=method)
        try:
            with self._opener.open(asked, timeout=self._timeout_s) as answer:
                return _read(answer, time.monotonic() + self._timeout_s)
        except error.HTTPError as problem:
            problem.close()
            if problem.code == 404:
                return None
            raise


def _read(answer: object, deadline: float) -> str:
    """All of a small answer; one that drips is cut off at the deadline."""
    data = b""
    while len(data) <= _ANSWER_BYTES:
        piece: bytes = answer.read1(4096)  # type: ignore[attr-defined]
        if not piece:
            return data.decode("utf-8")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer takes too long")
        data += piece
    raise ValueError("the answer is far too long")


class Aws:
    """EC2 spot: IMDSv2, an interruption two minutes ahead; a rebalance recommendation counts only if asked for."""

    USUAL = "http://169.254.169.254"

    def __init__(self, web: MetadataClient, also_rebalance: bool = False) -> None:
        self._web = web
        self._also_rebalance = also_rebalance
        self._token = ""
        self._token_until = 0.0

    def look(self) -> Notice | None:
        action = self._ask("/latest/meta-data/spot/instance-action")
        if action is not None:
            return aws_action(action, time.time())
        if self._also_rebalance and (advice := self._ask("/latest/meta-data/events/recommendations/rebalance")):
            return Notice(120.0, "aws", "rebalance recommendation", advice)
        return None

    def _ask(self, path: str) -> str | None:
        if time.monotonic() > self._token_until:
            self._new_token()
        try:
            return self._web.ask(self.USUAL, path, {"X-aws-ec2-metadata-token": self._token})
        except error.HTTPError as problem:
            if problem.code != 401:
                raise
            self._new_token()
            return self._web.ask(self.USUAL, path, {"X-aws-ec2-metadata-token": self._token})

    def _new_token(self) -> None:
        wish = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_S)}
        self._token = self._web.ask(self.USUAL, "/latest/api/token", wish, method="PUT") or ""
        self._token_until = time.monotonic() + _AWS_TOKEN_S * 0.9


class _Action(msgspec.Struct):
    action: str
    time: datetime.datetime


def aws_action(body: str, now: float) -> Notice:
    """An instance-action document as a notice; ValueError if it is none."""
    found = msgspec.json.decode(body, type=_Action)
    within_s = max(0.0, _timestamp(found.time) - now)
    return Notice(within_s, "aws", f"spot {found.action} at {found.time.isoformat()}", body)


class Gcp:
    """Compute Engine: `preempted` turns TRUE, about 30 seconds ahead."""

    USUAL = "http://metadata.google.internal"

    def __init__(self, web: MetadataClient) -> None:
        self._web = web

    def look(self) -> Notice | None:
        answer = self._web.ask(self.USUAL, "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return gcp_preempted(answer or "FALSE")


def gcp_preempted(body: str) -> Notice | None:
    match body.strip().upper():
        case "TRUE":
            return Notice(30.0, "gcp", "preempted", "preempted")
        case "FALSE":
            return None
    raise ValueError(f"neither TRUE nor FALSE: {body[:80]!r}")


class Azure:
    """Scheduled events that concern this machine and end its processes."""

    USUAL = "http://169.254.169.254"

    def __init__(self, web: MetadataClient) -> None:
        self._web = web
        self._name: str | None = None

    def look(self) -> Notice | None:
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (self._web.ask(self.USUAL, path, {"Metadata": "true"}) or "").strip()
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        answer = self._web.ask(self.USUAL, path, {"Metadata": "true"})
        return azure_events(answer, self._name, time.time()) if answer else None


class _Event(msgspec.Struct, rename="pascal"):
    event_id: str
    event_type: str
    resources: list[str] = []
    not_before: str = ""


class _Events(msgspec.Struct, rename="pascal"):
    events: list[_Event]


def azure_events(body: str, machine: str, now: float) -> Notice | None:
    """The first event that takes this machine away; a freeze does not."""
    for event in msgspec.json.decode(body, type=_Events).events:
        concerned = not machine or not event.resources or machine in event.resources
        if concerned and event.event_type in ("Preempt", "Terminate", "Reboot", "Redeploy"):
            at = email.utils.parsedate_to_datetime(event.not_before) if event.not_before else None
            within_s = max(0.0, _timestamp(at) - now) if at else 0.0
            return Notice(within_s, "azure", event.event_type, event.event_id)
    return None


class FileSource:
    """A file that appears, such as a batch script leaves on its signal: `SECONDS WHY`, both optional."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def look(self) -> Notice | None:
        try:
            changed = self._path.stat().st_mtime_ns
            with self._path.open(encoding="utf-8", errors="replace") as file:
                body = file.read(1000)
        except FileNotFoundError:
            return None
        return file_notice(body, str(changed))


def file_notice(body: str, key: str) -> Notice:
    first, _, rest = body.strip().partition(" ")
    try:
        within_s, detail = float(first), rest.strip()
    except ValueError:
        within_s, detail = 30.0, body.strip()
    return Notice(max(0.0, within_s), "file", detail or "the file appeared", key)


def _timestamp(at: datetime.datetime) -> float:
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()
