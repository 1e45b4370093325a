"""Environments of a machine: seen whole or not at all, kept while they are used, removed when they are not."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from shoal.errors import EnvironmentNotBuilt
from shoal.pack.remote import env_cache
from shoal.pack.remote.env_cache import STALE_S, UNUSED_S, EnvironmentCache

DOING = "builds"


def make(folder: str) -> None:
    """Something that counts as an environment."""
    os.mkdir(os.path.join(folder, "shoal"))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, said: list[str]) -> EnvironmentCache:
    return EnvironmentCache(str(tmp_path / "environments"), said.append)


def folders(tmp_path: Path) -> list[str]:
    return sorted(one.name for one in (tmp_path / "environments").iterdir() if one.is_dir())


def let_go(path: str) -> None:
    """As if the process that holds it had ended."""
    for number in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{number}") == os.path.realpath(f"{path}/used"):
            os.close(int(number))


def test_it_is_made_once(cache: EnvironmentCache, tmp_path: Path, said: list[str]) -> None:
    found = cache.get("a", DOING, make)
    assert cache.get("a", DOING, lambda _: pytest.fail("it is there")) == found
    assert folders(tmp_path) == [Path(found).name]
    assert said == [DOING]


def test_what_fails_leaves_a_word_and_nothing_else(cache: EnvironmentCache, tmp_path: Path) -> None:
    def fail(folder: str) -> None:
        make(folder)
        Path(folder, "log").write_text("oh no")
        raise EnvironmentNotBuilt("it cannot be", why="oh no")

    with pytest.raises(EnvironmentNotBuilt) as failed:
        cache.get("a", DOING, fail)
    assert folders(tmp_path) == []
    assert failed.value.where.endswith("environments/a.log")
    assert (tmp_path / "environments" / "a.log").read_text() == "oh no"
    assert Path(cache.get("a", DOING, make)).is_dir()


def test_who_waited_for_what_failed_does_not_try_it_again(
    cache: EnvironmentCache, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """While we wait for the lock, the one that has it fails."""

    def fail(_: str) -> None:
        raise EnvironmentNotBuilt("it cannot be", why="oh no", do="mend it")

    turns = iter([False, True])

    def locked(_: int) -> bool:
        turn = next(turns, True)
        if not turn:
            with pytest.raises(EnvironmentNotBuilt):
                EnvironmentCache(cache._root, lambda _: None)._make("a", DOING, fail, time.time())
            os.utime(cache._path("a.failed"), (time.time() + 1, time.time() + 1))
        return turn

    monkeypatch.setattr(env_cache, "_locked", locked)
    with pytest.raises(EnvironmentNotBuilt) as shared:
        cache.get("a", DOING, lambda _: pytest.fail("it would fail again"))
    assert (shared.value.why, shared.value.do) == ("oh no", "mend it")
    assert said == ["waits for another, which builds"]


def test_where_files_cannot_be_locked_the_first_one_counts(cache: EnvironmentCache, tmp_path: Path) -> None:
    first: list[str] = []

    def late(folder: str) -> None:
        make(folder)
        first.append(EnvironmentCache(cache._root, lambda _: None)._make("a", DOING, make, time.time()))

    assert [cache.get("a", DOING, late)] == first
    assert folders(tmp_path) == [Path(first[0]).name]


def test_one_whose_interpreter_is_gone_is_made_anew(cache: EnvironmentCache) -> None:
    before = cache.get("a", DOING, make)
    os.rmdir(os.path.join(before, "shoal"))
    assert cache.get("a", DOING, make) != before


def test_what_nobody_uses_for_long_goes_and_what_runs_stays(cache: EnvironmentCache, tmp_path: Path) -> None:
    used, unused, young = (cache.get(name, DOING, make) for name in ("used", "unused", "young"))
    long_ago = time.time() - UNUSED_S - 1
    for one in (used, unused):
        os.utime(f"{one}/used", (long_ago, long_ago))
        os.utime(one, (long_ago, long_ago))
    let_go(unused)
    let_go(young)
    other = cache.get("other", DOING, make)
    assert folders(tmp_path) == sorted(Path(one).name for one in (used, young, other))
    assert cache.get("unused", DOING, make) != unused


def test_what_was_left_half_made_goes_when_nobody_can_be_at_it(cache: EnvironmentCache, tmp_path: Path) -> None:
    left, fresh = tmp_path / "environments" / "a-left", tmp_path / "environments" / "a-fresh"
    for one in (left, fresh):
        make(str(one.mkdir() or one))
    os.utime(left, (time.time() - STALE_S - 1,) * 2)
    found = cache.get("a", DOING, make)
    assert folders(tmp_path) == sorted([Path(found).name, "a-fresh"])


def test_what_takes_very_long_is_not_taken_for_half_made(cache: EnvironmentCache, tmp_path: Path) -> None:
    def make_slowly(folder: str) -> None:
        """A large archive over a slow line, while another hire makes something else."""
        make(folder)
        for path in (folder, *Path(folder).iterdir()):
            os.utime(path, (0.0, time.time() - STALE_S - 60.0))
        EnvironmentCache(str(tmp_path / "environments"), lambda _: None).get("b", DOING, make)
        assert os.path.isdir(folder), "somebody else has removed it"

    assert Path(cache.get("a", DOING, make_slowly)).is_dir()


def test_one_that_is_taken_while_it_is_removed_is_not(
    cache: EnvironmentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cache.get("a", DOING, make)
    let_go(found)
    answers = iter([True, False])
    monkeypatch.setattr(env_cache, "_is_unused", lambda *_: next(answers))
    assert cache._keep("a.ready") == Path(found).name
    assert cache.get("a", DOING, lambda _: pytest.fail("it is there")) == found


def test_an_agent_holds_its_environment(cache: EnvironmentCache) -> None:
    found = cache.get("a", DOING, make)
    with open(f"{found}/used", "r+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
