"""A function travels by its name if it can, by value if it must, and never if somebody else has touched it."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import types
from pathlib import Path

import pytest

from shoal.errors import NotShippable, PackDamaged
from shoal.pack import function, manifest
from shoal.pack.manifest import PackedFunction, PackManifest

TOKEN = "secret"


def packed(directory: Path, given: object) -> PackManifest:
    contents = PackManifest(function.put(directory, given))  # type: ignore[arg-type]
    manifest.write(directory, contents, TOKEN)
    return contents


def forged(directory: Path, mark: Path) -> bytes:
    class Evil:
        def __reduce__(self) -> object:
            return (os.mkdir, (str(mark),))

    return pickle.dumps(Evil())


def test_a_function_of_a_module_travels_by_its_name(tmp_path: Path) -> None:
    assert packed(tmp_path, manifest.read).function == PackedFunction("read", module="shoal.pack.manifest")
    assert not (tmp_path / manifest.BLOBS).exists()
    assert function.load(tmp_path, manifest.read(tmp_path, TOKEN)) is manifest.read


def test_a_closure_travels_by_value(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    wanted = 42
    assert packed(tmp_path, lambda: wanted).function.pickled
    assert function.load(tmp_path, manifest.read(tmp_path, TOKEN))() == 42


def test_what_only_this_process_has_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("made_up_here")
    exec("def there(): ...", made.__dict__)
    monkeypatch.setitem(sys.modules, "made_up_here", made)
    assert function.importable(made.there) == ""
    assert function.importable(functools.partial(print)) == ""


def test_without_cloudpickle_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(NotShippable, match="cannot be sent") as raised:
        packed(tmp_path, lambda: None)
    assert "shoal-train[notebook]" in raised.value.do


def test_what_is_bound_to_its_process_cannot_travel(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    with (tmp_path / "open").open("w") as file, pytest.raises(NotShippable) as raised:
        packed(tmp_path, lambda: file)
    assert "pickled" in raised.value.why


def test_what_another_python_has_pickled_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    packed(tmp_path, lambda: 7)
    contents = manifest.read(tmp_path, TOKEN)
    assert function.load(tmp_path, contents)() == 7
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    with pytest.raises(NotShippable) as raised:
        function.load(tmp_path, contents)
    assert "Python 3.99" in raised.value.why
    assert "as python of the pool" in raised.value.do


def test_an_exchanged_pickle_is_not_loaded(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    contents = packed(tmp_path, lambda: None)
    blob = tmp_path / manifest.BLOBS / contents.function.pickled
    blob.chmod(0o600)
    blob.write_bytes(forged(tmp_path, tmp_path / "evil"))
    with pytest.raises(PackDamaged):
        function.load(tmp_path, manifest.read(tmp_path, TOKEN))
    assert not (tmp_path / "evil").exists()


def test_a_manifest_of_somebody_without_the_token_is_not_read(tmp_path: Path) -> None:
    evil = manifest.put_bytes(tmp_path, forged(tmp_path, tmp_path / "evil"))
    manifest.write(tmp_path, PackManifest(PackedFunction("f", pickled=evil)), "another token")
    with pytest.raises(PackDamaged, match="not signed"):
        manifest.read(tmp_path, TOKEN)


def test_a_changed_manifest_is_not_read(tmp_path: Path) -> None:
    packed(tmp_path, manifest.read)
    file = tmp_path / manifest.MANIFEST
    file.write_bytes(file.read_bytes().replace(b"shoal.pack.manifest", b"somebody.elses.name"))
    with pytest.raises(PackDamaged, match="not signed"):
        manifest.read(tmp_path, TOKEN)
