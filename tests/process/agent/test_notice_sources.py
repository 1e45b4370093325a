"""Notice sources against a loopback server that behaves like each cloud's, also when it fails."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shoal.agent.notices import source as notices

pytestmark = pytest.mark.process


class Cloud:
    """Metadata service with configured replies: a status, a body, and how long to hang before it."""

    def __init__(self) -> None:
        self.replies: dict[str, tuple[int, str, float]] = {}
        self.tokens: list[str] = []
        self.valid = ""
        self.requests: list[str] = []
        self.closing = threading.Event()
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                cloud.valid = f"token-{len(cloud.tokens)}"
                cloud.tokens.append(self.headers["X-aws-ec2-metadata-token-ttl-seconds"])
                self.reply(200, cloud.valid)

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                cloud.requests.append(path)
                if path.startswith("/latest/") and self.headers["X-aws-ec2-metadata-token"] != cloud.valid:
                    return self.reply(401, "no token")
                if path.startswith("/computeMetadata/") and self.headers["Metadata-Flavor"] != "Google":
                    return self.reply(403, "no flavour")
                if path.startswith("/metadata/") and self.headers["Metadata"] != "true":
                    return self.reply(400, "no header")
                status, body, hang_s = cloud.replies.get(path, (404, "not found", 0.0))
                cloud.closing.wait(hang_s)
                return self.reply(status, body)

            def reply(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    service = Cloud()
    yield service
    service.closing.set()
    service.server.shutdown()
    service.server.server_close()


def first(source: notices.NoticeSource, within_s: float = 120.0, then=lambda: None) -> notices.Notice:
    """Return the first notice; `then` runs while the source is polled."""

    async def listen() -> notices.Notice:
        async for notice in source.notices():
            return notice
        raise AssertionError

    async def both() -> notices.Notice:
        listening = asyncio.create_task(asyncio.wait_for(listen(), within_s))
        await asyncio.to_thread(then)
        return await listening

    return asyncio.run(both())


def wait_for_two_requests(cloud: Cloud, path: str) -> None:
    deadline = time.monotonic() + 120.0
    while cloud.requests.count(path) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cloud.requests.count(path) >= 2


AWS = "/latest/meta-data/spot/instance-action"
GCP = "/computeMetadata/v1/instance/preempted"
AZURE = "/metadata/scheduledevents"
EVENT = {"EventId": "A", "EventType": "Preempt", "Resources": ["vm1"], "NotBefore": "Mon, 18 Sep 2090 12:00:30 GMT"}
AWS_NOTICE = (200, '{"action": "terminate", "time": "2090-09-18T12:02:00Z"}', 0.0)
CLOUDS = [
    ("aws", AWS, (404, "", 0.0), AWS_NOTICE),
    ("gcp", GCP, (200, "FALSE", 0.0), (200, "TRUE", 0.0)),
    ("azure", AZURE, (200, json.dumps({"Events": []}), 0.0), (200, json.dumps({"Events": [EVENT]}), 0.0)),
]


@pytest.mark.parametrize(("name", "path", "before", "notice"), CLOUDS)
def test_notice_is_seen_when_it_appears(cloud, name, path, before, notice):
    cloud.replies[path] = before

    def then() -> None:
        wait_for_two_requests(cloud, path)
        cloud.replies[path] = notice

    received = first(notices.open_source(name, cloud.url, poll_s=0.05), then=then)
    assert received.source == name


@pytest.mark.parametrize(("name", "path", "before", "notice"), CLOUDS)
@pytest.mark.parametrize(
    "failure",
    [(500, "oops", 0.0), (200, "\x00<garbage", 0.0), (200, "x" * 100_000, 0.0), (200, "FALSE", 60.0)],
    ids=["fails", "garbage", "endless", "hangs"],
)
def test_failing_source_gives_no_notice_and_recovers(cloud, name, path, before, notice, failure):
    cloud.replies[path] = failure

    def then() -> None:
        wait_for_two_requests(cloud, path)
        cloud.replies[path] = notice

    assert first(notices.open_source(name, cloud.url, poll_s=0.05, timeout_s=0.3), then=then).source == name


def test_rejected_aws_token_is_renewed(cloud):
    def then() -> None:
        wait_for_two_requests(cloud, AWS)
        cloud.valid = "revoked"
        cloud.replies[AWS] = AWS_NOTICE

    assert first(notices.open_source("aws", cloud.url, poll_s=0.05), then=then).source == "aws"
    assert cloud.tokens == ["21600", "21600"]


def test_rebalance_recommendation_counts_only_if_requested(cloud):
    path = "/latest/meta-data/events/recommendations/rebalance"
    cloud.replies[path] = (200, '{"noticeTime": "2090-09-18T12:02:00Z"}', 0.0)
    assert first(notices.open_source("aws:rebalance", cloud.url, poll_s=0.05)).detail == "rebalance recommendation"
    with pytest.raises(TimeoutError):
        first(notices.open_source("aws", cloud.url, poll_s=0.05), within_s=0.5)


def test_notice_is_yielded_once(cloud):
    cloud.replies[GCP] = (200, "TRUE", 0.0)
    received = []

    async def listen() -> None:
        async for notice in notices.open_source("gcp", cloud.url, poll_s=0.02).notices():
            received.append(notice)

    async def listen_on() -> None:
        listening = asyncio.create_task(listen())
        deadline = time.monotonic() + 120.0
        while not received and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.wait([listening], timeout=0.5)
        listening.cancel()

    asyncio.run(listen_on())
    assert len(received) == 1


def test_plug_in_is_found_by_its_name(monkeypatch):
    class Entry:
        name = "mine"

        @staticmethod
        def load():
            return lambda url: ("a source for", url)

    monkeypatch.setattr(notices, "entry_points", lambda group: [Entry] if group == "shoal.notice_sources" else [])
    assert notices.open_source("mine", "http://base") == ("a source for", "http://base")


def test_unreachable_service_is_no_notice():
    with pytest.raises(TimeoutError):
        first(notices.open_source("gcp", "http://127.0.0.1:9", poll_s=0.05), within_s=0.4)
