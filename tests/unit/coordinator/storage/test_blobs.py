"""Blobs of the coordinator."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shoal.coordinator.storage.blobs import KEEP_S, Blobs
from shoal.errors import BadRequest, CoordinatorFull, UnknownBlob


async def chunks(*data: bytes) -> AsyncIterator[bytes]:
    for chunk in data:
        yield chunk


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_uploaded_blob_is_found_by_its_hash(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    asyncio.run(blobs.put(digest(b"onetwo"), chunks(b"one", b"two")))
    assert blobs.path(digest(b"onetwo")).read_bytes() == b"onetwo"
    assert blobs.missing([digest(b"onetwo"), digest(b"other")]) == [digest(b"other")]


def test_blob_that_does_not_match_its_hash_is_refused_and_removed(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    with pytest.raises(BadRequest, match="does not match its hash"):
        asyncio.run(blobs.put(digest(b"one"), chunks(b"two")))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UnknownBlob):
        blobs.path(digest(b"one"))


def test_only_old_blobs_are_swept(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    old, young = blobs.add(b"old"), blobs.add(b"young")
    past = blobs.path(old).stat().st_mtime - KEEP_S - 1
    os.utime(blobs.path(old), (past, past))
    assert asyncio.run(blobs.sweep([])) == 1
    assert blobs.missing([old, young]) == [old]


def test_blobs_have_a_quota_and_leave_the_reserve_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = Blobs(tmp_path)
    monkeypatch.setattr("shoal.coordinator.storage.blobs.QUOTA_BYTES", 10)
    asyncio.run(blobs.put(digest(b"12345678"), chunks(b"12345678")))
    with pytest.raises(CoordinatorFull, match="no space for the project"):
        asyncio.run(blobs.put(digest(b"abc"), chunks(b"abc")))
    asyncio.run(blobs.sweep([]))
    blobs.path(digest(b"12345678")).unlink()
    asyncio.run(blobs.put(digest(b"abc"), chunks(b"abc")))
    monkeypatch.setattr("shoal.coordinator.storage.disk_reserve.RESERVED_BYTES", 1 << 60)
    with pytest.raises(CoordinatorFull, match="cannot store the blob"):
        asyncio.run(blobs.put(digest(b"x"), chunks(b"x")))
    assert [path.name for path in tmp_path.iterdir()] == [digest(b"abc")], "no part is left"
