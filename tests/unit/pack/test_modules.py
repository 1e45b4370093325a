"""Modules that only this machine can import are found and sent; installed ones are not."""

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
    for name in [name for name in sys.modules if name.partition(".")[0].endswith("_here")]:
        del sys.modules[name]


def user_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0].endswith("_here")}


def test_user_modules_and_whole_packages_are_found(library: Path) -> None:
    files_by_name = modules.find_user_modules(user_modules())
    assert set(files_by_name) == {
        "lonely_here.py",
        "package_here/__init__.py",
        "package_here/inner.py",
        "package_here/never_imported.py",
        "package_here/data.txt",
        "package_here/deep/__init__.py",
        "package_here/deep/thing.py",
        "nameless_here/part.py",
    }
    assert all(path == library / name for name, path in files_by_name.items())


def test_installed_modules_are_skipped() -> None:
    installed = {
        name: sys.modules[name] for name in ("json", "os", "pytest", "msgspec", "sys", "shoal", "shoal.errors")
    }
    assert json
    assert os
    assert msgspec
    assert modules.find_user_modules(installed) == {}


def test_modules_sent_with_the_project_are_skipped(library: Path) -> None:
    sent = {library / "lonely_here.py", library / "package_here/__init__.py", library / "package_here/inner.py"}
    assert set(modules.find_user_modules(user_modules(), sent)) == {"nameless_here/part.py"}


def test_search_path_inside_the_project_becomes_relative(tmp_path: Path) -> None:
    search_path = [str(tmp_path), str(tmp_path / "src"), "/elsewhere"]
    assert modules.inside_project(search_path, tmp_path) == (".", "src")


def test_pack_is_complete_on_a_machine_that_does_not_see_this_disk(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.csv").write_text("1,2")
    local, remote = tmp_path / "local", tmp_path / "remote"
    local.mkdir()
    contents_sent = experiment_run.pack(
        local,
        sys.modules["package_here.inner"].made,
        {"data.csv": tmp_path / "data.csv"},
        modules.find_user_modules(user_modules()),
    )
    for name, path in files.files_to_send(local / experiment_run.PACK, contents_sent).items():
        (remote / name).parent.mkdir(parents=True, exist_ok=True)
        (remote / name).write_bytes(path.read_bytes())
    token = credentials.read(local / "token").token
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(library)])
    for name in list(user_modules()):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(remote)
    contents = manifest.read(Path(manifest.REMOTE_FOLDER), token)
    files.verify(contents.files, remote)
    files.verify(contents.modules, remote / manifest.REMOTE_FOLDER / manifest.MODULES)
    assert function.load(Path(manifest.REMOTE_FOLDER), contents, remote=True)() == 7
    assert Path(str(sys.modules["package_here"].__file__)).is_relative_to(remote)
    (remote / manifest.REMOTE_FOLDER / manifest.MODULES / "lonely_here.py").write_text("ANSWER = 43\n")
    with pytest.raises(PackDamaged):
        files.verify(contents.modules, remote / manifest.REMOTE_FOLDER / manifest.MODULES)
