"""Checkpoints in an object store: the real S3 driver against a local S3 server (moto). Needs s3fs and moto[server]."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

from shoal.errors import CheckpointFailed
from shoal.store import checkpoint
from shoal.store.blob_store import RemoteStore
from shoal.worker.transport.snapshot import Snapshot

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")

SIZE = 13_000_000


@pytest.fixture(scope="module")
def endpoint():
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def store(endpoint, monkeypatch):
    import s3fs

    for key, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }.items():
        monkeypatch.setenv(key, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"b{secrets.token_hex(4)}"
    s3fs.S3FileSystem().mkdir(bucket)
    return RemoteStore(f"s3://{bucket}/runs/r1")


def write(store: RemoteStore, step: int, fence=lambda: True) -> None:
    source = Snapshot(step, b"header", [np.full(SIZE, step, np.uint8), np.full(5, step, np.uint8)], readers=1)
    checkpoint.write(store, source, "checkpoint", run="r1", world=1, meta={}, fence=fence)


def test_a_checkpoint_goes_to_s3_and_comes_back(store):
    assert checkpoint.newest(store) is None
    write(store, 1)
    write(store, 2)
    loaded = checkpoint.read(store)
    assert loaded.entry.step == 2
    assert [set(buffer.tolist()) for buffer in loaded.buffers] == [{2}, {2}]


def test_an_upload_that_is_given_up_leaves_nothing_visible_and_the_previous_one_good(store):
    write(store, 1)
    with pytest.raises(CheckpointFailed):
        write(store, 2, fence=iter([True, True, True, False]).__next__)
    assert len(store.list()) == 2
    assert checkpoint.read(store).entry.step == 1


def test_old_checkpoints_are_pruned(store):
    for step in (1, 2, 3):
        write(store, step)
    checkpoint.prune(store, keep=2)
    assert [entry.step for entry in checkpoint.entries(store)] == [3, 2]
    assert len(store.list()) == 4


def test_a_bucket_that_does_not_exist_is_reported_and_does_no_harm(store):
    other = RemoteStore("s3://no-such-bucket-here/runs")
    with pytest.raises(Exception) as caught:  # noqa: PT011
        write(other, 1)
    assert caught.value.code in ("S502", "S503")
    assert caught.value.why
