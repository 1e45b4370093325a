"""Every example and README snippet runs, small."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHOAL = (sys.executable, "-m", "shoal.cli.main")


def call(*command: str | Path, cwd: Path, timeout_s: float = 590) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_HOME": str(cwd / "home")}
    for name in [name for name in environ if name.startswith("SHOAL_") and name != "SHOAL_HOME"]:
        del environ[name]
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def code_of(file: Path) -> list[str]:
    """The lines that do something: no docstring at the top, no blank lines."""
    text = re.sub(r'\A""".*?"""\n', "", file.read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip()]


def snippets(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def accuracy(output: str) -> float:
    found = re.findall(r"accuracy (0\.\d+|1\.0+)", output)
    assert found, output
    return float(found[-1])


def test_shoal_costs_an_import_and_five_lines() -> None:
    plain = code_of(EXAMPLES / "digits/plain.py")
    changed = [line for line in code_of(EXAMPLES / "digits/train.py") if line not in plain]
    assert changed[0] == "import shoal.torch as shoal"
    assert len(changed[1:]) <= 5, "\n".join(changed)


def test_the_plain_example_learns(tmp_path: Path) -> None:
    assert accuracy(call(sys.executable, EXAMPLES / "digits/plain.py", "--epochs", "6", cwd=tmp_path)) > 0.5


def test_the_digits_example_learns_alone(tmp_path: Path) -> None:
    assert accuracy(call(sys.executable, EXAMPLES / "digits/train.py", cwd=tmp_path)) > 0.95
    assert (tmp_path / "digits.pt").stat().st_size > 0


@pytest.mark.process
def test_the_digits_example_learns_with_two_members(tmp_path: Path) -> None:
    output = call(*SHOAL, "run", "-n", "2", EXAMPLES / "digits/train.py", "--epochs", "6", cwd=tmp_path)
    assert accuracy(output) > 0.8
    assert (tmp_path / "digits.pt").stat().st_size > 0


def test_the_text_example_runs_alone(tmp_path: Path) -> None:
    small = ("--sentences", "256", "--epochs", "1")
    assert "sums right" in call(sys.executable, EXAMPLES / "text/train.py", *small, cwd=tmp_path)
    assert (tmp_path / "text.pt").stat().st_size > 0


@pytest.mark.process
def test_the_text_example_runs_with_two_members(tmp_path: Path) -> None:
    small = ("--sentences", "256", "--epochs", "1")
    assert "sums right" in call(*SHOAL, "run", "-n", "2", EXAMPLES / "text/train.py", *small, cwd=tmp_path)


@pytest.mark.process
def test_the_script_of_the_readme_runs_alone_and_with_two_members(tmp_path: Path) -> None:
    (script,) = snippets("README.md", "python")
    (tmp_path / "train.py").write_text(script)
    call(sys.executable, "train.py", cwd=tmp_path)
    (tmp_path / "model.pt").unlink()
    call(*SHOAL, "run", "-n", "2", "train.py", cwd=tmp_path)
    assert (tmp_path / "model.pt").stat().st_size > 0


def test_the_scripts_of_the_quickstart_are_those_of_the_readme() -> None:
    (script,) = snippets("README.md", "python")
    assert script in snippets("docs/quickstart.md", "python")


def test_the_shell_scripts_parse_and_the_readme_names_them() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("demo", "test", "setup", "check", "docs", "can-netns"):
        script = ROOT / "scripts" / name
        assert os.access(script, os.X_OK), f"{script} cannot be executed"
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    assert "scripts/demo" in readme
    assert "scripts/test" in readme


@pytest.mark.process
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_the_demo_ends_well(tmp_path: Path) -> None:
    output = call(sys.executable, EXAMPLES / "demo.py", cwd=tmp_path, timeout_s=390)
    assert "all well" in output


def test_every_python_snippet_of_the_documentation_parses() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    for page in pages:
        if "_build" not in page.parts:
            for snippet in snippets(str(page.relative_to(ROOT)), "python"):
                compile(snippet, str(page), "exec")
