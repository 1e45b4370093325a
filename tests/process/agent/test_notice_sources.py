"""Notice sources against a server on loopback that behaves like each cloud's, at its best and at its worst."""

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
    """Answers as told; an answer is a status, a body, and how long to hang before it."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str, float]] = {}
        self.tokens: list[str] = []
        self.valid = ""
        self.asked: list[str] = []
        self.closing = threading.Event()
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                cloud.valid = f"token-{len(cloud.tokens)}"
                cloud.tokens.append(self.headers["X-aws-ec2-metadata-token-ttl-seconds"])
                self.answer(200, cloud.valid)

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                cloud.asked.append(path)
                if path.startswith("/latest/") and self.headers["X-aws-ec2-metadata-token"] != cloud.valid:
                    return self.answer(401, "no token")
                if path.startswith("/computeMetadata/") and self.headers["Metadata-Flavor"] != "Google":
                    return self.answer(403, "no flavour")
                if path.startswith("/metadata/") and self.headers["Metadata"] != "true":
                    return self.answer(400, "no header")
                status, body, hang_s = cloud.answers.get(path, (404, "not found", 0.0))
                cloud.closing.wait(hang_s)
                return self.answer(status, body)

            def answer(self, status: int, body: str) -> None:
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
    found = Cloud()
    yield found
    found.closing.set()
    found.server.shutdown()
    found.server.server_close()


def first(source: notices.NoticeSource, within_s: float = 20.0, then=lambda: None) -> notices.Notice:
    """The first notice, after which more is done to the cloud."""

    async def listen() -> notices.Notice:
        async for notice in source.notices():
            return notice
        raise AssertionError

    async def both() -> notices.Notice:
        listening = asyncio.create_task(asyncio.wait_for(listen(), within_s))
        await asyncio.to_thread(then)
        return await listening

    return asyncio.run(both())


def asked_twice(cloud: Cloud, path: str) -> None:
    deadline = time.monotonic() + 20.0
    while cloud.asked.count(path) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cloud.asked.count(path) >= 2


AWS = "/latest/meta-data/spot/instance-action"
GCP = "/computeMetadata/v1/instance/preempted"
AZURE = "/metadata/scheduledevents"
EVENT = {"EventId": "A", "EventType": "Preempt", "Resources": ["vm1"], "NotBefore": "Mon, 18 Sep 2090 12:00:30 GMT"}
CLOUDS = [
    ("aws", AWS, (404, "", 0.0), (200, '{"action": "terminate", "time": "2090-09-18T12:02:00Z"}', 0.0)),
    ("gcp", GCP, (200, "FALSE", 0.0), (200, "TRUE", 0.0)),
    ("azure", AZURE, (200, json.dumps({"Events": []}), 0.0), (200, json.dumps({"Events": [EVENT]}), 0.0)),
]


@pytest.mark.parametrize(("name", "path", "before", "notice"), CLOUDS)
def test_a_notice_is_seen_when_it_comes(cloud, name, path, before, notice):
    cloud.answers[path] = before

    def then() -> None:
        asked_twice(cloud, path)
        cloud.answers[path] = notice

    found = first(notices.source(name, cloud.url, poll_s=0.05), then=then)
    assert found.source == name


@pytest.mark.parametrize(("name", "path", "before", "notice"), CLOUDS)
@pytest.mark.parametrize(
    "trouble",
    [(500, "oops", 0.0), (200, "\x00<garbage", 0.0), (200, "x" * 100_000, 0.0), (200, "FALSE", 60.0)],
    ids=["fails", "garbage", "endless", "hangs"],
)
def test_a_source_in_trouble_gives_no_notice_and_recovers(cloud, name, path, before, notice, trouble):
    cloud.answers[path] = trouble

    def then() -> None:
        asked_twice(cloud, path)
        cloud.answers[path] = notice

    assert first(notices.source(name, cloud.url, poll_s=0.05, timeout_s=0.3), then=then).source == name


def test_an_aws_token_that_is_refused_is_fetched_anew(cloud):
    def then() -> None:
        asked_twice(cloud, AWS)
        cloud.valid = "revoked"
        cloud.answers[AWS] = CLOUDS[0][3]

    assert first(notices.source("aws", cloud.url, poll_s=0.05), then=then).source == "aws"
    assert cloud.tokens == ["21600", "21600"]


def test_a_rebalance_recommendation_counts_only_if_asked_for(cloud):
    path = "/latest/meta-data/events/recommendations/rebalance"
    cloud.answers[path] = (200, '{"noticeTime": "2090-09-18T12:02:00Z"}', 0.0)
    assert first(notices.source("aws:rebalance", cloud.url, poll_s=0.05)).detail == "rebalance recommendation"
    with pytest.raises(TimeoutError):
        first(notices.source("aws", cloud.url, poll_s=0.05), within_s=0.5)


def test_one_notice_is_told_once(cloud):
    cloud.answers[GCP] = (200, "TRUE", 0.0)
    told = []

    async def listen() -> None:
        async for notice in notices.source("gcp", cloud.url, poll_s=0.02).notices():
            told.append(notice)

    async def listen_on() -> None:
        listening = asyncio.create_task(listen())
        deadline = time.monotonic() + 20.0
        while not told and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.wait([listening], timeout=0.5)
        listening.cancel()

    asyncio.run(listen_on())
    assert len(told) == 1


def test_a_plug_in_is_found_by_its_name(monkeypatch):
    class Entry:
        name = "mine"

        @staticmethod
        def load():
            return lambda url: ("a source for", url)

    monkeypatch.setattr(notices, "entry_points", lambda group: [Entry] if group == "shoal.notice_sources" else [])
    assert notices.source("mine", "http://there") == ("a source for", "http://there")


def test_nobody_there_is_no_notice():
    with pytest.raises(TimeoutError):
        first(notices.source("gcp", "http://127.0.0.1:9", poll_s=0.05), within_s=0.4)
