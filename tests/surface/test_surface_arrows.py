"""Who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import shoal

ROOT = Path(__file__).parents[2]
SOURCE = Path(shoal.__file__).parent


def imported(file: Path) -> set[str]:
    """Every module that a file names in an import, wherever it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "shoal":
            found |= {f"shoal.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def tops(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(file)}


def test_the_arrows_of_the_design_hold() -> None:
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_core_needs_the_standard_library_and_numpy_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy", "shoal"}
    for file in sorted((SOURCE / "core").rglob("*.py")):
        assert tops(file) <= allowed, f"{file.name} imports {tops(file) - allowed}"
        ours = {name for name in imported(file) if name.split(".")[0] == "shoal"}
        assert {
            name for name in ours if not name.startswith(("shoal.core", "shoal.errors", "shoal.exit_codes"))
        } == set()


def test_core_has_no_clock_no_socket_no_thread_and_no_log() -> None:
    forbidden = {"time", "datetime", "socket", "threading", "asyncio", "logging", "subprocess", "random", "os"}
    for file in sorted((SOURCE / "core").rglob("*.py")):
        assert tops(file) & forbidden == set(), f"{file.name} imports {tops(file) & forbidden}"


def test_only_the_rooms_of_frameworks_name_torch() -> None:
    named = {file.relative_to(SOURCE).parts[0] for file in SOURCE.rglob("*.py") if "torch" in tops(file)}
    assert named <= {"keras", "testing", "torch"}


def test_nothing_from_the_network_or_disk_is_unpickled_but_what_the_run_has_signed() -> None:
    for file in SOURCE.rglob("*.py"):
        if file == SOURCE / "pack" / "function.py":
            continue
        assert tops(file) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"} == set(), f"{file} unpickles"


def reads_environment(file: Path) -> bool:
    tree = ast.walk(ast.parse(file.read_text()))
    return any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in tree)


def test_a_member_reads_the_environment_in_one_place() -> None:
    rooms = ("core", "wire", "store", "worker", "torch")
    files = [file for room in rooms for file in (SOURCE / room).rglob("*.py") if reads_environment(file)]
    assert [str(file.relative_to(SOURCE)) for file in files] == ["worker/join.py"]
