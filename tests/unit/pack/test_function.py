"""Functions in packs: sent by name or by value, and rejected if they were modified."""

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


def packed(directory: Path, user_function: object) -> PackManifest:
    contents = PackManifest(function.put(directory, user_function))  # type: ignore[arg-type]
    manifest.write(directory, contents, TOKEN)
    return contents


def forged_pickle(mark: Path) -> bytes:
    class Evil:
        def __reduce__(self) -> object:
            return (os.mkdir, (str(mark),))

    return pickle.dumps(Evil())


def test_function_of_a_module_is_sent_by_name(tmp_path: Path) -> None:
    assert packed(tmp_path, manifest.read).function == PackedFunction("read", module="shoal.pack.manifest")
    assert not (tmp_path / manifest.BLOBS).exists()
    assert function.load(tmp_path, manifest.read(tmp_path, TOKEN)) is manifest.read


def test_closure_is_sent_by_value(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    answer = 42
    assert packed(tmp_path, lambda: answer).function.pickled
    assert function.load(tmp_path, manifest.read(tmp_path, TOKEN))() == 42


def test_module_without_a_file_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_up_here")
    exec("def there(): ...", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_up_here", module)
    assert function.importable(module.there) == ""
    assert function.importable(functools.partial(print)) == ""


def test_missing_cloudpickle_is_reported_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(NotShippable, match="cannot be sent") as raised:
        packed(tmp_path, lambda: None)
    assert "shoal-train[notebook]" in raised.value.do


def test_function_that_refers_to_an_open_file_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    with (tmp_path / "open").open("w") as file, pytest.raises(NotShippable) as raised:
        packed(tmp_path, lambda: file)
    assert "pickled" in raised.value.why


def test_pickle_of_another_python_version_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    packed(tmp_path, lambda: 7)
    contents = manifest.read(tmp_path, TOKEN)
    assert function.load(tmp_path, contents)() == 7
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    with pytest.raises(NotShippable) as raised:
        function.load(tmp_path, contents)
    assert "Python 3.99" in raised.value.why
    assert "as python of the pool" in raised.value.do


def test_replaced_pickle_is_not_loaded(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    contents = packed(tmp_path, lambda: None)
    blob = tmp_path / manifest.BLOBS / contents.function.pickled
    blob.chmod(0o600)
    blob.write_bytes(forged_pickle(tmp_path / "evil"))
    with pytest.raises(PackDamaged):
        function.load(tmp_path, manifest.read(tmp_path, TOKEN))
    assert not (tmp_path / "evil").exists()
