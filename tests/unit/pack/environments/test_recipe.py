"""Recipes of environments: kinds, published files and their identity; what machines run first."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import errors
from shoal.errors import BadEnvironment
from shoal.pack.environments import recipe as environments_recipe
from shoal.pack.environments import wheel

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
def test_kind_of_environment_follows_from_its_name(name: str, kind: str) -> None:
    assert environments_recipe.kind_of(name) == kind


@pytest.mark.parametrize("name", ["env.tar.zst", "environment.yml", "pyproject.toml", "env.zip", "env", "uv.lock"])
def test_unknown_kind_is_rejected_with_the_known_ones(name: str) -> None:
    with pytest.raises(BadEnvironment) as refused:
        environments_recipe.kind_of(name)
    assert ("uv export" if name == "uv.lock" else "a requirements file (.txt)") in refused.value.do


def test_environment_is_resolved_relative_to_shoal_toml(tmp_path: Path) -> None:
    (tmp_path / "needs.txt").write_text("numpy\n")
    assert environments_recipe.resolve("needs.txt", tmp_path) == str(tmp_path / "needs.txt")
    assert environments_recipe.resolve(str(tmp_path / "needs.txt"), Path("/")) == str(tmp_path / "needs.txt")
    assert (environments_recipe.resolve("", tmp_path), environments_recipe.resolve("shoal", tmp_path)) == (
        "",
        "shoal",
    )
    with pytest.raises(BadEnvironment) as missing:
        environments_recipe.resolve("none.txt", tmp_path, "[pool.lab]")
    assert (missing.value.what, missing.value.where) == ("no such file: none.txt", "[pool.lab]")
    assert str(tmp_path / "none.txt") in missing.value.why


@pytest.fixture(autouse=True)
def _small_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the wheel of pip: packing the real one takes longer than all the rest."""
    monkeypatch.setattr(wheel, "build_pip_wheel", lambda: ("pip-1-py3-none-any.whl", b"pip"))


class Store(dict[str, bytes]):
    def put(self, source: Path | bytes) -> str:
        data = source if isinstance(source, bytes) else source.read_bytes()
        name = hashlib.sha256(data).hexdigest()
        self[name] = data
        return name

    def recipe(self, text: str) -> dict[str, Any]:
        recipe: dict[str, Any] = json.loads(self[environments_recipe.publish(text, self.put).recipe])
        return recipe


def test_all_files_of_a_recipe_are_stored_once_under_their_hashes(tmp_path: Path) -> None:
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


def test_requirements_depend_on_shoal_and_an_archive_only_on_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, packed = tmp_path / "requirements.txt", tmp_path / "env.tar.gz"
    file.write_text("numpy\n")
    packed.write_bytes(b"packed")
    store = Store()
    first = {path: store.recipe(str(path))["made_of"] for path in (file, packed)}
    monkeypatch.setattr(wheel, "build_shoal_wheel", lambda: ("shoal-9-py3-none-any.whl", b"newer"))
    second = {path: store.recipe(str(path))["made_of"] for path in (file, packed)}
    assert first[file] != second[file]
    assert first[packed] == second[packed]
    file.write_text("numpy<2\n")
    assert store.recipe(str(file))["made_of"] != second[file]


def test_bootstrap_modules_parse_as_python_3_7_and_need_only_the_standard_library() -> None:
    root = Path(shoal.__file__).parent
    allowed = {f"shoal.{name.replace('/', '.')}".removesuffix(".__init__") for name in ON_MACHINES}
    for name in ON_MACHINES:
        tree = ast.parse((root / f"{name}.py").read_text(), feature_version=(3, 7))
        for node in _at_run_time(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert all(module in allowed or module.partition(".")[0] in sys.stdlib_module_names for module in names), (
                name,
                names,
            )


def _at_run_time(tree: ast.Module) -> list[Any]:
    """Return the imports of a module, except those under TYPE_CHECKING."""
    types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    hidden = {child for node in types for child in ast.walk(node)}
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and node not in hidden]


def test_error_codes_in_the_bootstrap_exist() -> None:
    texts = [
        (Path(shoal.__file__).parent / f"{name}.py").read_text()
        for name in ("pack/remote/bootstrap", "engines/agent_script")
    ]
    codes = {
        kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ShoalError)
    }
    assert set(re.findall(r"error\[(S\d+)\]", "".join(texts))) == {"S442", "S444"} & codes
