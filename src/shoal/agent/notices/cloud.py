"""Notices of clouds, read from their metadata services: EC2 spot, Compute Engine, Azure scheduled events."""

from __future__ import annotations

import datetime
import email.utils
import time
from urllib import error, request

import msgspec

from shoal.agent.notices.source import Notice

_MAX_REPLY_BYTES = 64 << 10
_AWS_TOKEN_S = 21600


class MetadataClient:
    """HTTP client for metadata services: limited in time and size, and never through a proxy."""

    def __init__(self, base: str, timeout_s: float) -> None:
        self._base = base.rstrip("/")
        self._timeout_s = timeout_s
        self._opener = request.build_opener(request.ProxyHandler({}))

    def get(self, default_url: str, path: str, headers: dict[str, str], method: str = "GET") -> str | None:
        """Return the text of the reply; None for status 404. Raise OSError or ValueError if it fails."""
        http_request = request.Request((self._base or default_url) + path, headers=headers, method=method)
        try:
            with self._opener.open(http_request, timeout=self._timeout_s) as response:
                return _read(response, time.monotonic() + self._timeout_s)
        except error.HTTPError as failure:
            failure.close()
            if failure.code == 404:
                return None
            raise


def _read(response: object, deadline: float) -> str:
    """Return the whole reply; raise TimeoutError if it trickles in past the deadline, ValueError if it is long."""
    data = b""
    while len(data) <= _MAX_REPLY_BYTES:
        chunk: bytes = response.read1(4096)  # type: ignore[attr-defined]
        if not chunk:
            return data.decode("utf-8")
        if time.monotonic() > deadline:
            raise TimeoutError("the reply takes too long")
        data += chunk
    raise ValueError("the reply is too long")


class Aws:
    """EC2 spot instances: IMDSv2 announces an interruption two minutes ahead.

    With `with_rebalance`, a rebalance recommendation counts too; it comes earlier, and may be a false alarm.
    """

    DEFAULT_URL = "http://169.254.169.254"

    def __init__(self, client: MetadataClient, with_rebalance: bool = False) -> None:
        self._client = client
        self._with_rebalance = with_rebalance
        self._token = ""
        self._token_until = 0.0

    def poll(self) -> Notice | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            return aws_action(action, time.time())
        if self._with_rebalance and (advice := self._get("/latest/meta-data/events/recommendations/rebalance")):
            return Notice(120.0, "aws", "rebalance recommendation", advice)
        return None

    def _get(self, path: str) -> str | None:
        if time.monotonic() > self._token_until:
            self._new_token()
        try:
            return self._client.get(self.DEFAULT_URL, path, {"X-aws-ec2-metadata-token": self._token})
        except error.HTTPError as failure:
            if failure.code != 401:
                raise
            self._new_token()
            return self._client.get(self.DEFAULT_URL, path, {"X-aws-ec2-metadata-token": self._token})

    def _new_token(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_S)}
        self._token = self._client.get(self.DEFAULT_URL, "/latest/api/token", headers, method="PUT") or ""
        self._token_until = time.monotonic() + _AWS_TOKEN_S * 0.9


class _Action(msgspec.Struct):
    """Instance-action document of EC2."""

    action: str
    time: datetime.datetime


def aws_action(body: str, now: float) -> Notice:
    """Return the notice of an instance-action document; raise ValueError if it is malformed."""
    document = msgspec.json.decode(body, type=_Action)
    within_s = max(0.0, _timestamp(document.time) - now)
    return Notice(within_s, "aws", f"spot {document.action} at {document.time.isoformat()}", body)


class Gcp:
    """Compute Engine: `preempted` becomes TRUE about 30 seconds ahead."""

    DEFAULT_URL = "http://metadata.google.internal"

    def __init__(self, client: MetadataClient) -> None:
        self._client = client

    def poll(self) -> Notice | None:
        reply = self._client.get(
            self.DEFAULT_URL, "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
        )
        return gcp_preempted(reply or "FALSE")


def gcp_preempted(body: str) -> Notice | None:
    """Return the notice if the value is TRUE, None if it is FALSE; raise ValueError for anything else."""
    match body.strip().upper():
        case "TRUE":
            return Notice(30.0, "gcp", "preempted", "preempted")
        case "FALSE":
            return None
    raise ValueError(f"neither TRUE nor FALSE: {body[:80]!r}")


class Azure:
    """Azure: scheduled events that concern this machine and end its processes."""

    DEFAULT_URL = "http://169.254.169.254"

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._name: str | None = None

    def poll(self) -> Notice | None:
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (self._client.get(self.DEFAULT_URL, path, {"Metadata": "true"}) or "").strip()
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        reply = self._client.get(self.DEFAULT_URL, path, {"Metadata": "true"})
        return azure_events(reply, self._name, time.time()) if reply else None


class _Event(msgspec.Struct, rename="pascal"):
    """Scheduled event of Azure."""

    event_id: str
    event_type: str
    resources: list[str] = []
    not_before: str = ""


class _Events(msgspec.Struct, rename="pascal"):
    events: list[_Event]


def azure_events(body: str, machine: str, now: float) -> Notice | None:
    """Return the notice of the first event that takes this machine away; a freeze does not."""
    for event in msgspec.json.decode(body, type=_Events).events:
        concerned = not machine or not event.resources or machine in event.resources
        if concerned and event.event_type in ("Preempt", "Terminate", "Reboot", "Redeploy"):
            at = email.utils.parsedate_to_datetime(event.not_before) if event.not_before else None
            within_s = max(0.0, _timestamp(at) - now) if at else 0.0
            return Notice(within_s, "azure", event.event_type, event.event_id)
    return None


def _timestamp(at: datetime.datetime) -> float:
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()
