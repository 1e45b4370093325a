"""What is sent for an environment, and how its pieces are named."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import errors
from shoal.errors import BadEnvironment
from shoal.pack.environments import recipe as environments_recipe
from shoal.pack.environments import requirements, wheel

ON_MACHINES = (
    "__init__",
    *(
        f"errors/{name}"
        for name in ("__init__", "base", "codes", "usage", "membership", "training", "launch", "storage")
    ),
    "pack/__init__",
    *(
        f"pack/remote/{name}"
        for name in ("__init__", "bootstrap", "env_main", "env_cache", "env_builders", "env_commands")
    ),
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("shoal", "requirements"),
        ("requirements.txt", "requirements"),
        ("~/locks/requirements-gpu.txt", "requirements"),
        ("pylock.toml", "requirements"),
        ("pylock.gpu.toml", "requirements"),
        ("env.tar.gz", "archive"),
        ("env.tgz", "archive"),
        ("env.tar.xz", "archive"),
        ("app.pex", "pex"),
    ],
)
def test_what_an_environment_is_is_told_by_its_name(name: str, kind: str) -> None:
    assert environments_recipe.kind_of(name) == kind


@pytest.mark.parametrize("name", ["env.tar.zst", "environment.yml", "pyproject.toml", "env.zip", "env", "uv.lock"])
def test_other_kinds_are_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(BadEnvironment) as refused:
        environments_recipe.kind_of(name)
    assert ("uv export" if name == "uv.lock" else "a requirements file (.txt)") in refused.value.do


def test_an_environment_is_looked_for_beside_shoal_toml(tmp_path: Path) -> None:
    (tmp_path / "needs.txt").write_text("numpy\n")
    assert environments_recipe.resolve("needs.txt", tmp_path) == str(tmp_path / "needs.txt")
    assert environments_recipe.resolve(str(tmp_path / "needs.txt"), Path("/")) == str(tmp_path / "needs.txt")
    assert (environments_recipe.resolve("", tmp_path), environments_recipe.resolve("shoal", tmp_path)) == (
        "",
        "shoal",
    )
    with pytest.raises(BadEnvironment) as missing:
        environments_recipe.resolve("none.txt", tmp_path, "[pool.lab]")
    assert (missing.value.what, missing.value.where) == ("there is no file none.txt", "[pool.lab]")
    assert str(tmp_path / "none.txt") in missing.value.why


@pytest.fixture(autouse=True)
def _small_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing the real one takes longer than all the rest."""
    monkeypatch.setattr(wheel, "build_pip_wheel", lambda: ("pip-1-py3-none-any.whl", b"pip"))


class Store(dict[str, bytes]):
    def put(self, source: Path | bytes) -> str:
        data = source if isinstance(source, bytes) else source.read_bytes()
        name = hashlib.sha256(data).hexdigest()
        self[name] = data
        return name

    def recipe(self, text: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self[environments_recipe.publish(text, self.put).recipe])
        return found


def test_all_that_a_machine_needs_is_sent_once_and_named_by_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("numpy\n")
    store = Store()
    recipe = store.recipe(str(file))
    assert (recipe["kind"], recipe["label"]) == ("requirements", "requirements.txt")
    assert set(recipe["files"]) == {"requirements.txt", recipe["shoal"], recipe["pip"]}
    assert set(recipe["files"].values()) < set(store)
    before = len(store)
    assert store.recipe(str(file)) == recipe
    assert len(store) == before


def test_what_is_installed_depends_on_the_file_and_on_shoal_and_an_archive_on_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, packed = tmp_path / "requirements.txt", tmp_path / "env.tar.gz"
    file.write_text("numpy\n")
    packed.write_bytes(b"packed")
    store = Store()
    first = {one: store.recipe(str(one))["made_of"] for one in (file, packed)}
    monkeypatch.setattr(wheel, "build_shoal_wheel", lambda: ("shoal-9-py3-none-any.whl", b"newer"))
    second = {one: store.recipe(str(one))["made_of"] for one in (file, packed)}
    assert first[file] != second[file]
    assert first[packed] == second[packed]
    file.write_text("numpy<2\n")
    assert store.recipe(str(file))["made_of"] != second[file]


def test_a_requirements_file_takes_along_what_it_refers_to(tmp_path: Path) -> None:
    (tmp_path / "deps").mkdir()
    (tmp_path / "ours-1.0-py3-none-any.whl").write_bytes(b"wheel")
    (tmp_path / "deps" / "base.txt").write_text("-c limits.txt\nnumpy  # arrays\n")
    (tmp_path / "deps" / "limits.txt").write_text("-r base.txt\nnumpy<3\n")
    (tmp_path / "requirements.txt").write_text(
        "# all\n--find-links /opt/wheels\n-rdeps/base.txt\n--constraint=deps/limits.txt\n./ours-1.0-py3-none-any.whl\n"
        "torch==2.13.0 \\\n    --hash=sha256:aa\nthat @ https://host/that-1.0.whl\n-r https://host/more.txt\n"
    )
    found = requirements.gather(tmp_path / "requirements.txt")
    assert found["ours-1.0-py3-none-any.whl"] == tmp_path / "ours-1.0-py3-none-any.whl"
    assert bytes(found["requirements.txt"]).decode().splitlines() == [
        "# all",
        "--find-links /opt/wheels",
        "-r included-1.txt",
        "--constraint included-2.txt",
        "./ours-1.0-py3-none-any.whl",
        "torch==2.13.0      --hash=sha256:aa",
        "that @ https://host/that-1.0.whl",
        "-r https://host/more.txt",
    ]
    assert found["included-1.txt"] == b"-c included-2.txt\nnumpy  # arrays\n"
    assert found["included-2.txt"] == b"-r included-1.txt\nnumpy<3\n"


@pytest.mark.parametrize(
    "line",
    [
        "-e .",
        "--editable=./lib",
        "./lib",
        "/abs/lib",
        "lib/",
        "./gone.whl",
        "-r gone.txt",
        "-f ./lib",
        "--find-links=lib",
    ],
)
def test_what_is_only_on_this_disk_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "requirements.txt").write_text(f"numpy\n{line}\n")
    with pytest.raises(BadEnvironment) as refused:
        requirements.gather(tmp_path / "requirements.txt")
    assert refused.value.do


def test_a_lock_becomes_requirements_with_all_hashes() -> None:
    wheels = [{"url": "https://host/b.whl", "hashes": {"sha256": "bb"}}, {"hashes": {"sha256": "aa"}}]
    numpy = {"name": "numpy", "version": "2.0", "wheels": wheels, "sdist": {"hashes": {"sha256": "cc"}}}
    colorama = {"name": "colorama", "version": "1", "marker": "os_name == 'nt'", "wheels": wheels[1:]}
    assert requirements.from_lock({"lock-version": "1.0", "packages": [numpy, colorama]}).splitlines() == [
        "numpy==2.0 --hash=sha256:aa --hash=sha256:bb --hash=sha256:cc",
        "colorama==1 ; os_name == 'nt' --hash=sha256:aa",
    ]
    with pytest.raises(BadEnvironment, match="ours of the lock"):
        requirements.from_lock({"lock-version": "1.0", "packages": [{"name": "ours", "directory": {"path": "."}}]})
    with pytest.raises(BadEnvironment, match="no lock"):
        requirements.from_lock({"version": 1, "package": []})


@pytest.mark.parametrize(
    "packages",
    [
        '[[packages]]\nversion = "2.0"\nwheels = [{hashes = {sha256 = "aa"}}]',
        '[[packages]]\nname = "numpy"\nversion = "2.0"\nwheels = [{url = "https://host/b.whl"}]',
        '[[packages]]\nname = "numpy"\nversion = 2.0\nwheels = [{hashes = {sha256 = "aa"}}]',
        '[[packages]]\nname = "numpy"\nversion = "2.0"\nwheels = [{hashes = "aa"}]',
        '[[packages]]\nname = "numpy"\nversion = "2.0"\nwheels = {hashes = {sha256 = "aa"}}',
        'packages = ["numpy"]',
        'packages = "numpy"',
        "",
    ],
)
def test_a_damaged_lock_is_refused_with_its_place_and_a_remedy(tmp_path: Path, packages: str) -> None:
    lock = tmp_path / "pylock.toml"
    lock.write_text(f'lock-version = "1.0"\ncreated-by = "hand"\n{packages}\n')
    with pytest.raises(BadEnvironment, match="the lock is damaged") as refused:
        requirements.gather(lock)
    assert refused.value.where == str(lock)
    assert refused.value.why
    assert refused.value.do


def test_the_wheel_of_shoal_is_the_same_every_time_and_whole(tmp_path: Path) -> None:
    name, data = wheel.build_shoal_wheel()
    assert (name, wheel.build_shoal_wheel()[1]) == (f"shoal_train-{shoal.__version__}-py3-none-any.whl", data)
    (tmp_path / name).write_bytes(data)
    with zipfile.ZipFile(tmp_path / name) as made:
        names = made.namelist()
        assert {"shoal/agent/__main__.py", "shoal/pack/remote/env_main.py"} < set(names)
        assert not [one for one in names if "__pycache__" in one]
        record = made.read(f"shoal_train-{shoal.__version__}.dist-info/RECORD").decode().splitlines()
        assert {line.split(",")[0] for line in record} == set(names)
        assert b"Requires-Dist: msgspec" in made.read(f"shoal_train-{shoal.__version__}.dist-info/METADATA")


def test_what_runs_on_machines_first_is_read_by_old_pythons_and_needs_nothing() -> None:
    root = Path(shoal.__file__).parent
    known = {f"shoal.{name.replace('/', '.')}".removesuffix(".__init__") for name in ON_MACHINES}
    for name in ON_MACHINES:
        tree = ast.parse((root / f"{name}.py").read_text(), feature_version=(3, 7))
        for node in _at_run_time(tree):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert all(one in known or one.partition(".")[0] in sys.stdlib_module_names for one in names), (name, names)


def _at_run_time(tree: ast.Module) -> list[Any]:
    """The imports of a module that are not only for who reads types."""
    types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    hidden = {one for node in types for one in ast.walk(node)}
    return [one for one in ast.walk(tree) if isinstance(one, ast.Import | ast.ImportFrom) and one not in hidden]


def test_every_error_of_a_machine_has_its_page() -> None:
    texts = [
        (Path(shoal.__file__).parent / f"{name}.py").read_text()
        for name in ("pack/remote/bootstrap", "engines/agent_script")
    ]
    known = {one.code for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.ShoalError)}
    assert set(re.findall(r"error\[(S\d+)\]", "".join(texts))) == {"S442", "S444"} & known
