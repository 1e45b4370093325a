"""Signed manifests and blobs of packs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import PackDamaged
from shoal.pack import manifest
from shoal.pack.manifest import PackedFunction, PackManifest

TOKEN = "secret"
CONTENTS = PackManifest(PackedFunction("train", module="project.train"), files={"data.csv": "0" * 64})


def test_signed_manifest_is_read_back(tmp_path: Path) -> None:
    manifest.write(tmp_path, CONTENTS, TOKEN)
    assert manifest.read(tmp_path, TOKEN) == CONTENTS


def test_manifest_signed_with_another_token_is_rejected(tmp_path: Path) -> None:
    manifest.write(tmp_path, CONTENTS, "another token")
    with pytest.raises(PackDamaged, match="not signed"):
        manifest.read(tmp_path, TOKEN)


def test_modified_manifest_is_rejected(tmp_path: Path) -> None:
    manifest.write(tmp_path, CONTENTS, TOKEN)
    file = tmp_path / manifest.MANIFEST
    file.write_bytes(file.read_bytes().replace(b"project.train", b"another.train"))
    with pytest.raises(PackDamaged, match="not signed"):
        manifest.read(tmp_path, TOKEN)


def test_blob_is_stored_read_only_under_its_hash(tmp_path: Path) -> None:
    digest = manifest.put_bytes(tmp_path, b"contents")
    (tmp_path / "file").write_bytes(b"contents")
    assert manifest.put_file(tmp_path, tmp_path / "file") == digest == manifest.hash_file(tmp_path / "file")
    (blob,) = (tmp_path / manifest.BLOBS).iterdir()
    assert (blob.name, blob.stat().st_mode & 0o777) == (digest, 0o400)
    assert manifest.get_bytes(tmp_path, digest) == b"contents"


def test_missing_and_modified_blob_are_rejected(tmp_path: Path) -> None:
    digest = manifest.put_bytes(tmp_path, b"contents")
    blob = tmp_path / manifest.BLOBS / digest
    blob.chmod(0o600)
    blob.write_bytes(b"others")
    with pytest.raises(PackDamaged, match="does not match its hash"):
        manifest.get_bytes(tmp_path, digest)
    blob.unlink()
    with pytest.raises(PackDamaged, match="missing"):
        manifest.get_bytes(tmp_path, digest)
