"""Reports of a machine's setup to the coordinator."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ArchiveDamaged, EnvironmentNotFetched, RemoteCacheUnwritable, RemoteDiskFull
from shoal.pack.remote import env_main
from shoal.pack.remote.env_main import SetupCancelled, SetupReporter


class FakeClient:
    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []

    def post(self, path: str, body: bytes, timeout_s: float) -> None:
        self.posts.append((path, json.loads(body)))


def test_activity_is_reported_when_it_changes_and_every_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    client, clock = FakeClient(), iter([0.0, 1.0, 2.0, 31.0, 33.0])
    monkeypatch.setattr(env_main, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    reporter = SetupReporter(client, "lab-1", None)  # type: ignore[arg-type]
    for activity in ("waits", "waits", "builds", "builds", "builds"):
        reporter.report(activity)
    assert [body["why"] for _, body in client.posts] == ["waits", "builds", "builds"]
    assert client.posts[0][0] == "/v1/allocations/lab-1"


def test_only_errors_of_the_environment_itself_are_final() -> None:
    client = FakeClient()
    reporter = SetupReporter(client, "lab-1", None)  # type: ignore[arg-type]
    for error in (ArchiveDamaged("x", why="y", do="z"), EnvironmentNotFetched("x", why="y", do="z")):
        assert reporter.fail(error) == env_main.FAILED
    assert [(body["failed"], body["final"]) for _, body in client.posts] == [(True, True), (True, False)]


def test_end_of_the_lifeline_cancels_the_setup() -> None:
    read_end, write_end = os.pipe()
    try:
        reporter = SetupReporter(FakeClient(), "lab-1", read_end)  # type: ignore[arg-type]
        reporter.report("builds")
        os.close(write_end)
        with pytest.raises(SetupCancelled):
            reporter.report("builds")
    finally:
        os.close(read_end)


def test_full_disk_is_told_apart_from_an_unwritable_one() -> None:
    assert isinstance(env_main.disk_error(OSError(errno.ENOSPC, "full", "/cache")), RemoteDiskFull)
    assert isinstance(env_main.disk_error(OSError(errno.EACCES, "denied", "/cache")), RemoteCacheUnwritable)
