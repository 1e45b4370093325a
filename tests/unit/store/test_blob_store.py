"""A blob appears whole or not at all, in a directory and behind a URL."""

from __future__ import annotations

import builtins
import errno
import secrets

import pytest
from fsspec.registry import _registry as drivers

from shoal.errors import StoreUnusable
from shoal.store.blob_store import Blob, LocalStore, RemoteStore, open_store


@pytest.fixture(params=["local", "memory", "file"])
def store(request, tmp_path):
    if request.param == "local":
        return LocalStore(tmp_path / "deep" / "dir")
    if request.param == "memory":
        return RemoteStore(f"memory://{secrets.token_hex(4)}/dir")
    return RemoteStore(f"file://{tmp_path}/deep/dir")


def content(store, name: str) -> bytes:
    with store.open(name) as file:
        return file.read()


def test_what_is_put_can_be_read(store):
    assert store.put("a", [b"one", b"", b"two"]) == 6
    assert content(store, "a") == b"onetwo"


def test_putting_again_replaces(store):
    store.put("a", [b"long content"])
    store.put("a", [b"x"])
    assert content(store, "a") == b"x"
    assert store.list() == [Blob("a", 1)]


def test_blobs_are_listed_by_prefix_in_order(store):
    for name in ("b2", "a1", "b1"):
        store.put(name, [b"xy"])
    assert store.list("b") == [Blob("b1", 2), Blob("b2", 2)]


def test_an_empty_store_has_no_blobs_and_deletes_nothing(store):
    assert store.list() == []
    store.delete("anything")


def test_deleting_takes_a_prefix(store):
    for name in ("step-1.data", "step-1.manifest", "step-10.data"):
        store.put(name, [b"x"])
    store.delete("step-1.")
    assert [blob.name for blob in store.list()] == ["step-10.data"]


def test_a_blob_that_is_not_there_is_an_os_error(store):
    with pytest.raises(FileNotFoundError):
        store.open("nothing")


def test_a_source_that_fails_leaves_no_blob(store):
    def chunks():
        yield b"some"
        raise OSError(errno.EIO, "the source failed")

    with pytest.raises(OSError, match="the source failed"):
        store.put("a", chunks())
    assert store.list() == []


def test_a_source_that_fails_leaves_the_old_blob_of_a_directory(tmp_path):
    def chunks():
        yield b"some"
        raise OSError(errno.EIO, "the source failed")

    store = LocalStore(tmp_path)
    store.put("a", [b"old"])
    with pytest.raises(OSError, match="the source failed"):
        store.put("a", chunks())
    assert content(store, "a") == b"old"


def test_a_directory_knows_what_is_free(tmp_path):
    assert LocalStore(tmp_path / "not" / "there").free_bytes() > 0


def test_other_failures_of_a_driver_become_os_errors():
    store = RemoteStore("memory://anywhere")

    class Broken:
        def invalidate_cache(self):
            raise RuntimeError("no credentials")

    store._files = Broken()
    with pytest.raises(OSError, match="no credentials"):
        store.list()


def test_the_kind_of_store_follows_from_the_place(tmp_path):
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert isinstance(open_store(f"file://{tmp_path}"), LocalStore)
    assert isinstance(open_store("memory://x"), RemoteStore)


def test_a_missing_driver_is_reported_with_what_to_install(monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name.startswith("s3fs"):
            raise ImportError("No module named s3fs")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    # fsspec remembers a driver that another test has used.
    monkeypatch.delitem(drivers, "s3", raising=False)
    monkeypatch.delitem(drivers, "s3a", raising=False)
    with pytest.raises(StoreUnusable) as caught:
        open_store("s3://bucket/dir")
    assert caught.value.do == "pip install s3fs"


def test_a_missing_fsspec_is_reported_with_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(StoreUnusable) as caught:
        open_store("s3://bucket/dir")
    assert "shoal-train[remote]" in caught.value.do


def test_an_unknown_scheme_is_reported():
    with pytest.raises(StoreUnusable, match="nosuch://x"):
        open_store("nosuch://x")
