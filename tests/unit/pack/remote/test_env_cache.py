"""Cache of environments: published atomically, kept while in use, removed later."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from shoal.errors import EnvironmentNotBuilt
from shoal.pack.remote import env_cache
from shoal.pack.remote.env_cache import STALE_S, UNUSED_S, EnvironmentCache

ACTIVITY = "builds"


def build(folder: str) -> None:
    """Create the least that counts as an environment."""
    os.mkdir(os.path.join(folder, "shoal"))


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, reports: list[str]) -> EnvironmentCache:
    return EnvironmentCache(str(tmp_path / "environments"), reports.append)


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "environments").iterdir() if path.is_dir())


def release(path: str) -> None:
    """Close the lock on an environment, as the end of its process would."""
    for number in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{number}") == os.path.realpath(f"{path}/used"):
            os.close(int(number))


def test_environment_is_built_once(cache: EnvironmentCache, tmp_path: Path, reports: list[str]) -> None:
    folder = cache.get("a", ACTIVITY, build)
    assert cache.get("a", ACTIVITY, lambda _: pytest.fail("it is cached")) == folder
    assert folders(tmp_path) == [Path(folder).name]
    assert reports == [ACTIVITY]


def test_failed_build_leaves_only_its_log(cache: EnvironmentCache, tmp_path: Path) -> None:
    def fail(folder: str) -> None:
        build(folder)
        Path(folder, "log").write_text("no compiler")
        raise EnvironmentNotBuilt("build failed", why="no compiler")

    with pytest.raises(EnvironmentNotBuilt) as failed:
        cache.get("a", ACTIVITY, fail)
    assert folders(tmp_path) == []
    assert failed.value.where.endswith("environments/a.log")
    assert (tmp_path / "environments" / "a.log").read_text() == "no compiler"
    assert Path(cache.get("a", ACTIVITY, build)).is_dir()


def test_process_that_waited_for_a_failed_build_reports_its_error(
    cache: EnvironmentCache, monkeypatch: pytest.MonkeyPatch, reports: list[str]
) -> None:
    """The build of the lock's owner fails while we wait for the lock."""

    def fail(_: str) -> None:
        raise EnvironmentNotBuilt("build failed", why="no compiler", do="install one")

    attempts = iter([False, True])

    def try_lock(_: int) -> bool:
        locked = next(attempts, True)
        if not locked:
            with pytest.raises(EnvironmentNotBuilt):
                EnvironmentCache(cache._root, lambda _: None)._build("a", ACTIVITY, fail, time.time())
            os.utime(cache._path("a.failed"), (time.time() + 1, time.time() + 1))
        return locked

    monkeypatch.setattr(env_cache, "_try_lock", try_lock)
    with pytest.raises(EnvironmentNotBuilt) as shared:
        cache.get("a", ACTIVITY, lambda _: pytest.fail("it would fail again"))
    assert (shared.value.why, shared.value.do) == ("no compiler", "install one")
    assert reports == ["waits for another process, which builds"]


def test_first_of_two_concurrent_builds_wins_without_locks(cache: EnvironmentCache, tmp_path: Path) -> None:
    first: list[str] = []

    def build_late(folder: str) -> None:
        build(folder)
        first.append(EnvironmentCache(cache._root, lambda _: None)._build("a", ACTIVITY, build, time.time()))

    assert [cache.get("a", ACTIVITY, build_late)] == first
    assert folders(tmp_path) == [Path(first[0]).name]


def test_environment_without_its_interpreter_is_built_again(cache: EnvironmentCache) -> None:
    before = cache.get("a", ACTIVITY, build)
    os.rmdir(os.path.join(before, "shoal"))
    assert cache.get("a", ACTIVITY, build) != before


def test_unused_environment_is_removed_and_one_in_use_is_kept(cache: EnvironmentCache, tmp_path: Path) -> None:
    used, unused, young = (cache.get(name, ACTIVITY, build) for name in ("used", "unused", "young"))
    long_ago = time.time() - UNUSED_S - 1
    for path in (used, unused):
        os.utime(f"{path}/used", (long_ago, long_ago))
        os.utime(path, (long_ago, long_ago))
    release(unused)
    release(young)
    other = cache.get("other", ACTIVITY, build)
    assert folders(tmp_path) == sorted(Path(path).name for path in (used, young, other))
    assert cache.get("unused", ACTIVITY, build) != unused


def test_old_unfinished_folder_is_removed_and_a_recent_one_is_kept(cache: EnvironmentCache, tmp_path: Path) -> None:
    stale, fresh = tmp_path / "environments" / "a-stale", tmp_path / "environments" / "a-fresh"
    for folder in (stale, fresh):
        folder.mkdir()
        build(str(folder))
    os.utime(stale, (time.time() - STALE_S - 1,) * 2)
    built = cache.get("a", ACTIVITY, build)
    assert folders(tmp_path) == sorted([Path(built).name, "a-fresh"])


def test_folder_of_a_slow_build_is_not_removed(cache: EnvironmentCache, tmp_path: Path) -> None:
    def build_slowly(folder: str) -> None:
        """Take longer than STALE_S while another process builds another environment."""
        build(folder)
        for path in (folder, *Path(folder).iterdir()):
            os.utime(path, (0.0, time.time() - STALE_S - 60.0))
        EnvironmentCache(str(tmp_path / "environments"), lambda _: None).get("b", ACTIVITY, build)
        assert os.path.isdir(folder), "the other process removed it"

    assert Path(cache.get("a", ACTIVITY, build_slowly)).is_dir()


def test_environment_taken_during_its_removal_is_kept(
    cache: EnvironmentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache.get("a", ACTIVITY, build)
    release(folder)
    answers = iter([True, False])
    monkeypatch.setattr(env_cache, "_is_unused", lambda *_: next(answers))
    assert cache._folder_to_keep("a.ready") == Path(folder).name
    assert cache.get("a", ACTIVITY, lambda _: pytest.fail("it is cached")) == folder


def test_agent_locks_its_environment(cache: EnvironmentCache) -> None:
    folder = cache.get("a", ACTIVITY, build)
    with open(f"{folder}/used", "r+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
