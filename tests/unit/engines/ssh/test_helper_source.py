"""The helper's source as it travels to hosts."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.engines.ssh import command, helper_source, remote_helper


@pytest.mark.parametrize("module", helper_source.MODULES, ids=lambda module: module.__name__)
def test_module_parses_on_the_oldest_python_and_imports_only_what_travels_with_it(module) -> None:
    tree = ast.parse(inspect.getsource(module), feature_version=command.OLDEST_HELPER)
    travelling = {sent.__name__ for sent in helper_source.MODULES}
    imported = {
        f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shoal")
        for alias in node.names
    }
    assert imported <= travelling
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import) and node.names[0].name[:5] == "shoal"]


def test_program_answers_without_an_installed_shoal(tmp_path: Path) -> None:
    request = {"do": "list", "directory": str(tmp_path), "tag": "mine", "gpus": False}
    text = f"{json.dumps(helper_source.program())}\n{json.dumps(request)}"
    run = [sys.executable, "-I", "-S", "-c", "import json, sys; exec(json.loads(sys.stdin.readline()))"]
    done = subprocess.run(run, input=text, capture_output=True, text=True, cwd="/", check=True, timeout=60)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(remote_helper.REPLY_MARK)]
    reply = json.loads(line.removeprefix(remote_helper.REPLY_MARK))
    assert (reply["state"], reply["allocations"], reply["others"]) == ("listed", [], 0)
