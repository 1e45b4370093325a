"""Modules that only this machine can import travel; those that any machine has do not."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from shoal.errors import PackDamaged
from shoal.experiment import run as experiment_run
from shoal.pack import files, function, manifest, modules
from shoal.wire import credentials

FILES = {
    "lonely_here.py": "ANSWER = 42\n",
    "package_here/__init__.py": "",
    "package_here/inner.py": "from package_here.deep import thing\ndef made(): return thing.VALUE\n",
    "package_here/never_imported.py": "",
    "package_here/data.txt": "hello",
    "package_here/__pycache__/junk.pyc": "",
    "package_here/deep/__init__.py": "",
    "package_here/deep/thing.py": "VALUE = 7\n",
    "nameless_here/part.py": "X = 1\n",
    "nameless_here/unused.py": "X = 1\n",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "library"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(str(root))
    for name in ("lonely_here", "package_here.inner", "nameless_here.part"):
        importlib.import_module(name)
    yield root
    for name in [one for one in sys.modules if one.partition(".")[0].endswith("_here")]:
        del sys.modules[name]


def ours() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0].endswith("_here")}


def test_modules_and_whole_packages_travel(library: Path) -> None:
    found = modules.find_user_modules(ours())
    assert set(found) == {
        "lonely_here.py",
        "package_here/__init__.py",
        "package_here/inner.py",
        "package_here/never_imported.py",
        "package_here/data.txt",
        "package_here/deep/__init__.py",
        "package_here/deep/thing.py",
        "nameless_here/part.py",
    }
    assert all(path == library / name for name, path in found.items())


def test_what_any_machine_has_stays_here() -> None:
    known = {name: sys.modules[name] for name in ("json", "os", "pytest", "msgspec", "sys", "shoal", "shoal.errors")}
    assert json
    assert os
    assert msgspec
    assert modules.find_user_modules(known) == {}


def test_what_goes_with_the_project_does_not_go_twice(library: Path) -> None:
    sent = {library / "lonely_here.py", library / "package_here/__init__.py", library / "package_here/inner.py"}
    assert set(modules.find_user_modules(ours(), sent)) == {"nameless_here/part.py"}


def test_places_in_the_project_are_named_as_they_are_there(tmp_path: Path) -> None:
    places = [str(tmp_path), str(tmp_path / "src"), "/elsewhere"]
    assert modules.inside_project(places, tmp_path) == (".", "src")


def test_a_pack_is_whole_on_a_machine_that_sees_nothing_of_ours(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.csv").write_text("1,2")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    made = experiment_run.pack(
        here,
        sys.modules["package_here.inner"].made,
        {"data.csv": tmp_path / "data.csv"},
        modules.find_user_modules(ours()),
    )
    for name, path in files.files_to_send(here / experiment_run.PACK, made).items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(path.read_bytes())
    token = credentials.read(here / "token").token
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(library)])
    for name in list(ours()):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(there)
    contents = manifest.read(Path(manifest.REMOTE_FOLDER), token)
    files.verify(contents.files, there)
    files.verify(contents.modules, there / manifest.REMOTE_FOLDER / manifest.MODULES)
    assert function.load(Path(manifest.REMOTE_FOLDER), contents, remote=True)() == 7
    assert Path(str(sys.modules["package_here"].__file__)).is_relative_to(there)
    (there / manifest.REMOTE_FOLDER / manifest.MODULES / "lonely_here.py").write_text("ANSWER = 43\n")
    with pytest.raises(PackDamaged):
        files.verify(contents.modules, there / manifest.REMOTE_FOLDER / manifest.MODULES)
