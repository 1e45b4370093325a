"""Files that members send to a real coordinator, which is killed in the middle; and who brings them where."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.process.coordinator.fakes import WAIT_S, Coordinator

from shoal.store.blob_store import Blob, CoordinatorAccess
from shoal.store.coordinator_store import PIECE_BYTES, CoordinatorStore
from shoal.testing.wait import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

PIECES = 4


def store_of(coordinator: Coordinator, run: str, folder: str) -> CoordinatorStore:
    return CoordinatorStore(CoordinatorAccess(coordinator.url, str(coordinator.directory / "token")), run, folder)


def parts(coordinator: Coordinator, run: str) -> list[Path]:
    return list((coordinator.directory / "runs" / run / "uploads").glob("*"))


def fetch(coordinator: Coordinator, run: str, to: Path, *options: str, token: str = "") -> dict[str, Any]:
    where = ["--url", coordinator.url, "--token-file", token or str(coordinator.directory / "token")]
    argv = [sys.executable, "-m", "shoal.cli.main", "--json", "fetch", *where, *options, run, str(to)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    answer: dict[str, Any] = json.loads(done.stdout or done.stderr)
    return answer


def test_upload_survives_the_kill_of_the_coordinator(coordinator: Coordinator, tmp_path: Path) -> None:
    run = coordinator.create()
    store = store_of(coordinator, run, "checkpoints")
    killed = threading.Event()

    def chunks() -> Iterator[bytes]:
        for number in range(PIECES):
            if number == PIECES - 1:
                # The first chunks have arrived by now, and the next ones find no coordinator.
                until(lambda: parts(coordinator, run), "the first piece")
                coordinator.kill()
                killed.set()
            yield bytes([number]) * PIECE_BYTES

    def start_again() -> None:
        killed.wait(WAIT_S)
        time.sleep(0.3)
        coordinator.restart()

    reviver = threading.Thread(target=start_again, daemon=True)
    reviver.start()
    assert store.put("big", chunks()) == PIECES * PIECE_BYTES
    assert killed.is_set()
    reviver.join(WAIT_S)
    assert store.list() == [Blob("big", PIECES * PIECE_BYTES)]
    with store.open("big") as file:
        assert all(file.read(PIECE_BYTES) == bytes([number]) * PIECE_BYTES for number in range(PIECES))
        assert file.read() == b""
    until(lambda: parts(coordinator, run) == [], "what arrived of the broken upload is removed")

    # Saved files are downloaded once, by users who may.
    outputs = store_of(coordinator, run, "outputs")
    outputs.put("deep/model.pt", [b"model"])
    outputs.put("notes.txt", [b"note"])
    first = fetch(coordinator, run, tmp_path / "to")
    assert sorted(first["downloaded"]) == ["deep/model.pt", "notes.txt"]
    assert (tmp_path / "to" / "deep" / "model.pt").read_bytes() == b"model"
    time.sleep(0.01)
    outputs.put("notes.txt", [b"nota"])
    again = fetch(coordinator, run, tmp_path / "to", "--checkpoints")
    assert (sorted(again["downloaded"]), again["present"]) == (["checkpoints/big", "notes.txt"], 1)
    assert (tmp_path / "to" / "notes.txt").read_bytes() == b"nota"
    assert (tmp_path / "to" / "checkpoints" / "big").stat().st_size == PIECES * PIECE_BYTES

    # A user may not have what another user's run has saved.
    argv = [sys.executable, "-m", "shoal.cli.main", "token", "bob", "--dir", str(coordinator.directory)]
    subprocess.run(argv, check=True, capture_output=True, timeout=180)
    refused = fetch(coordinator, run, tmp_path / "bob", token=str(coordinator.directory / "tokens" / "bob"))
    assert (refused["code"], "not to bob" in refused["what"]) == ("S213", True), refused
    assert "ask " in refused["do"]
    assert not (tmp_path / "bob").exists()


def test_client_that_disconnects_during_an_upload_leaves_no_file(coordinator: Coordinator) -> None:
    run = coordinator.create()
    where = urlsplit(coordinator.url)
    query = f"upload={'a' * 16}&offset=0&size=100&digest={'0' * 64}"
    head = f"PUT /v1/runs/{run}/files/outputs/x?{query} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: 100\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in coordinator.credentials.headers.items())
    with socket.create_connection((str(where.hostname), where.port), timeout=WAIT_S) as line:
        line.sendall(f"{head}\r\n".encode() + b"only some")
        time.sleep(0.2)
    store = store_of(coordinator, run, "outputs")
    store.put("y", [b"y"])
    assert store.list() == [Blob("y", 1)]
    until(lambda: parts(coordinator, run) == [], "what arrived of the broken upload is removed")
