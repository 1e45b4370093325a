"""Builders of environments: keys, archives, and what pip's output means."""

from __future__ import annotations

import errno
import io
import sys
import tarfile
from pathlib import Path

import pytest

from shoal.errors import ArchiveDamaged, EnvironmentNotBuilt, PythonTooOld
from shoal.pack.remote import env_builders
from shoal.pack.remote.env_builders import EnvironmentBuilder


class FakeCache:
    """Cache whose reports go nowhere."""

    def report(self, activity: str) -> None:
        del activity


class FakeCoordinator:
    """Blobs by digest."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        self._blobs = blobs

    def get(self, digest: str, path: str) -> None:
        Path(path).write_bytes(self._blobs[digest])


def builder(kind: str, label: str, blobs: dict[str, bytes] | None = None) -> EnvironmentBuilder:
    recipe = {"kind": kind, "label": label, "made_of": "x", "files": {label: "digest"}, "shoal": "s", "pip": ""}
    return EnvironmentBuilder(FakeCoordinator(blobs or {}), FakeCache(), recipe)  # type: ignore[arg-type]


def archive(*members: tuple[str, bytes | None]) -> bytes:
    """Return a tar of files, and of a link to our interpreter for each name without contents."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, contents in members:
            info = tarfile.TarInfo(name)
            if contents is None:
                info.type, info.linkname = tarfile.SYMTYPE, sys.executable
            info.size = len(contents or b"")
            tar.addfile(info, io.BytesIO(contents or b""))
    return file.getvalue()


@pytest.mark.parametrize("folder", ["", "env-1/"])
def test_interpreter_of_an_archive_is_found_at_its_root_or_in_a_folder(folder: str, tmp_path: Path) -> None:
    blob = archive((f"{folder}bin/python", None), (f"{folder}lib/a.py", b"x = 1"))
    python = builder("archive", "env.tar.gz", {"digest": blob})._unpack(str(tmp_path))
    assert python == str(tmp_path / "env" / folder / "bin" / "python")
    assert not (tmp_path / "sources").exists()


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (b"not an archive", "file could not be opened"),
        (archive(("bin/python", None))[:40], ""),
        (archive(("readme", b"no Python")), "it contains no bin/python"),
        (archive(("../outside", b"x")), "outside the archive's folder"),
        (archive(("/etc/outside", b"x")), "outside the archive's folder"),
    ],
    # An archive contains the time at which it was made: as a name it would differ between the workers of one test run.
    ids=["no archive", "cut off", "no interpreter", "parent", "absolute"],
)
def test_bad_archive_is_refused_with_the_reason(blob: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(ArchiveDamaged, match=r"env\.tar\.gz cannot be unpacked") as error:
        builder("archive", "env.tar.gz", {"digest": blob})._unpack(str(tmp_path))
    assert why in error.value.why
    assert not (tmp_path / "outside").exists()


def test_output_of_pip_tells_a_full_disk_from_a_missing_index_and_a_bad_file() -> None:
    build = builder("requirements", "requirements.txt")
    with pytest.raises(OSError, match="No space left") as error:
        build._install_error(["ERROR: [Errno 28] No space left on device"])
    assert error.value.errno == errno.ENOSPC
    offline = build._install_error(["WARNING: NewConnectionError", "ERROR: no matching distribution for torch"])
    assert isinstance(offline, EnvironmentNotBuilt)
    assert "--index-url" in offline.do
    assert build._install_error(["ERROR: no such package tprch"]).do == "correct requirements.txt"


def test_key_depends_on_the_interpreter_that_the_environment_is_built_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = tmp_path / "python3.14"
    monkeypatch.setattr(env_builders, "NEWER_PYTHONS", (newer.name,))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(env_builders, "MIN_PYTHON", (99, 0))
    keys = []
    for version in ("3.14.0", "3.14.1"):
        newer.write_text(f"#!/bin/sh\necho {version}\n")
        newer.chmod(0o755)
        keys.append(builder("requirements", "requirements.txt")._machine_key())
    assert keys[0] != keys[1]
    assert sys.version not in keys[0]


def test_archive_does_not_depend_on_any_interpreter_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_builders, "MIN_PYTHON", (99, 0))
    monkeypatch.setattr(env_builders, "NEWER_PYTHONS", ())
    assert builder("archive", "env.tar.gz")._machine_key()
    with pytest.raises(PythonTooOld, match="too old"):
        builder("pex", "env.pex")._machine_key()
