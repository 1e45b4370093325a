"""Real builds of environments: once, complete or not at all, and with a clear error."""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.process.environment.bare_machine import PYTHON, Machine, running

from shoal.pack.environments import recipe, requirements, wheel
from shoal.testing.wait import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

UP = "usage: shoal.agent"


def test_concurrent_agents_build_one_environment_and_a_later_one_reuses_it(machine: Machine) -> None:
    """Requirements with hashes are installed as they are, and Shoal's dependencies are added."""
    file = next(machine.wheels.glob("greeting-*.whl"))
    made = machine.requirements(f"greeting==1.0 --hash=sha256:{machine.put(file)}")
    both = [machine.start(name, made) for name in ("lab-1", "lab-2")]
    assert [process.wait(100) for process in both] == [0, 0], machine.log("lab-1") + machine.log("lab-2")
    assert all(UP in machine.log(name) for name in ("lab-1", "lab-2"))
    output = machine.log("lab-1") + machine.log("lab-2")
    assert output.count("builds its environment from requirements.txt") == 2
    assert output.count("which builds its environment from requirements.txt") == 1, (
        "the second agent waits for the first"
    )
    reports = len(machine.reports)
    assert reports >= 2
    code, output = machine.run("lab-3", made)
    assert (code, UP in output, len(machine.reports)) == (0, True, reports), output
    show = "import greeting, shoal; print(greeting.WORDS, shoal.__file__)"
    shown = subprocess.run([machine.python(), "-B", "-c", show], capture_output=True, text=True, env={})
    assert shown.stdout.startswith(f"hello {machine.environments}"), shown.stderr
    inside = machine.environments / machine.folders()[0]
    assert {path.name for path in inside.iterdir()} == {"log", "python", "ready", "used", "venv"}
    assert [path.name for path in machine.environments.glob("*.whl")] == [f"shoal-{made.shoal[:20]}.whl"]
    assert not list(inside.rglob("greeting.*.pyc")), "pip uses the machine's variables"


def test_failed_installation_is_reported_and_leaves_no_folder(machine: Machine) -> None:
    code, output = machine.run("lab-1", machine.requirements("no-such-thing==9"))
    assert code == 4
    assert "error[S441] requirements.txt cannot be installed on" in output
    assert "No matching distribution found for no-such-thing==9" in output
    (why,) = machine.failures()
    assert "No matching distribution found for no-such-thing==9; correct requirements.txt (shoal explain S441)" in why
    assert machine.folders() == []
    (log,) = machine.environments.glob("*.log")
    assert str(log) in output
    assert "no-such-thing" in log.read_text()


def test_password_in_an_invalid_line_is_not_reported(machine: Machine) -> None:
    code, output = machine.run("lab-1", machine.requirements("--index https://ada:pa55word@example.org/simple --foo"))
    assert code == 4
    assert "error[S441]" in output
    assert "https://****@example.org/simple" in output
    assert "pa55word" not in output
    assert "pa55word" not in str(machine.reports)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """Create a packed environment with Shoal's dependencies and a conda-unpack that records where it ran."""
    folder = tmp_path_factory.mktemp("packed")
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (site,) = (folder / "env").glob("lib/*/site-packages")
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    (folder / "env" / "bin" / "conda-unpack").write_text(
        "import pathlib, subprocess, sys\npathlib.Path(sys.prefix, 'unpacked').write_text(sys.prefix)\n"
        f"if pathlib.Path({str(folder / 'wait')!r}).exists():\n    subprocess.run(['sleep', '600'])\n"
    )
    return folder


def archive(folder: Path, name: str, *leave_out: str, how: str = "gz") -> Path:
    path = folder / name
    with tarfile.open(path, f"w:{how}") as made:  # type: ignore[call-overload]
        made.add(
            folder / "env",
            "." if "conda" in name else "env",
            filter=lambda entry: None if any(part in entry.name for part in leave_out) else entry,
        )
    return path


def start_endless_build(
    machine: Machine, packed: Path, made: recipe.PublishedEnvironment, *, lifeline: bool = False
) -> subprocess.Popen[bytes]:
    """Start an agent and return it in the middle of a build that does not end."""
    (packed / "wait").touch()
    process = machine.start("lab-1", made, lifeline=lifeline)
    until(lambda: any("sleep" in child.cmdline() for child in running(process.pid)), "the build")
    (packed / "wait").unlink()
    return process


def test_cancelled_build_leaves_no_folder_and_no_process(machine: Machine, packed: Path) -> None:
    process = start_endless_build(machine, packed, recipe.publish(str(archive(packed, "env.tar.gz")), machine.put))
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 128 + signal.SIGTERM
    until(lambda: not running(process.pid), "the end of its processes")
    assert machine.folders() == []
    assert not machine.failures()


def test_build_whose_lifeline_ends_leaves_no_folder_and_no_process(machine: Machine, packed: Path) -> None:
    made = recipe.publish(str(archive(packed, "env.tar.gz")), machine.put)
    process = start_endless_build(machine, packed, made, lifeline=True)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(180) == 128 + signal.SIGTERM
    until(lambda: not running(process.pid), "the end of its processes")
    assert machine.folders() == []


def test_folder_of_a_killed_build_is_not_used(machine: Machine, packed: Path) -> None:
    made = recipe.publish(str(archive(packed, "env.tar.gz")), machine.put)
    process = start_endless_build(machine, packed, made)
    process.kill()
    process.wait(180)
    until(lambda: not any("conda-unpack" in str(child.cmdline()) for child in running(process.pid)), "its end")
    for child in running(process.pid):
        child.kill()
    (unfinished,) = machine.folders()
    code, output = machine.run("lab-2", made)
    assert (code, UP in output) == (0, True), output
    (ready,) = machine.environments.glob("archive-*.ready")
    assert ready.read_text() in set(machine.folders()) - {unfinished}


@pytest.mark.parametrize("name", ["conda.tar.gz", "plain.tgz"])
def test_packed_environment_is_unpacked_once_and_shoal_added(machine: Machine, packed: Path, name: str) -> None:
    made = recipe.publish(str(archive(packed, name)), machine.put)
    for allocation in ("lab-1", "lab-2"):
        code, output = machine.run(allocation, made)
        assert (code, UP in output) == (0, True), output
    (folder,) = machine.folders()
    (mark,) = (machine.environments / folder).rglob("unpacked")
    assert mark.read_text() == str(mark.parent), "conda-unpack ran in the final folder"


def test_unusable_archive_is_reported_with_its_cause(machine: Machine, packed: Path) -> None:
    complete = archive(packed, "conda.tar.gz")
    cut = packed / "cut.tar.gz"
    cut.write_bytes(complete.read_bytes()[: complete.stat().st_size // 2])
    corrupt = archive(packed, "corrupt.tar.xz", how="xz")
    middle = corrupt.stat().st_size // 2
    corrupt.write_bytes(corrupt.read_bytes()[:middle] + b"\xff" * 64 + corrupt.read_bytes()[middle + 64 :])
    for number, (path, code, words) in enumerate(
        [
            (cut, "S540", "cut.tar.gz cannot be unpacked"),
            (corrupt, "S540", "corrupt.tar.xz cannot be unpacked"),
            (archive(packed, "none.tar.gz", "/bin/python"), "S540", "it contains no bin/python"),
            (archive(packed, "poor.tar.gz", "_here.pth"), "S445", "No module named"),
        ]
    ):
        exit_code, output = machine.run(f"lab-{number}", recipe.publish(str(path), machine.put))
        assert exit_code == 4, output
        assert f"error[{code}]" in output
        assert words in output
    assert machine.folders() == []


def test_agent_imports_the_packages_of_a_pex(machine: Machine, wheels: Path, tmp_path: Path) -> None:
    path = tmp_path / "app.pex"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("__main__.py", PEX)
        for wheel_path in wheels.glob("*.whl"):
            made.write(wheel_path, f".deps/{wheel_path.name}")
    code, output = machine.run("lab-1", recipe.publish(str(path), machine.put))
    assert (code, UP in output) == (0, True), output
    shown = subprocess.run([machine.python(), "-c", "import greeting; print(greeting.WORDS)"], capture_output=True)
    assert shown.stdout == b"hello\n", shown.stderr


# Does what a .pex does under PEX_INTERPRETER: unpacks its packages and puts them on the path.
PEX = """
import os, sys, zipfile
assert os.environ["PEX_INTERPRETER"] == "1"
root = os.environ["PEX_ROOT"]
me = zipfile.ZipFile(sys.argv[0])
for name in me.namelist():
    if name.endswith(".whl"):
        me.extract(name, root)
        zipfile.ZipFile(os.path.join(root, name)).extractall(os.path.join(root, "unpacked"))
unpacked = os.path.join(root, "unpacked")
for name in os.listdir(unpacked):
    if name.endswith(".pth"):
        os.path.exists(root + "/here") or os.symlink(open(os.path.join(unpacked, name)).read().strip(), root + "/here")
sys.path.append(root + "/here")
sys.path.append(unpacked)
sys.argv = sys.argv[2:]
exec(sys.argv.pop(0))
"""


def test_missing_venv_is_reported_with_what_to_install(machine: Machine, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(
        f'#!/bin/sh\nif [ "$2" = venv ]; then echo "No module named venv" >&2; exit 1; fi\nexec {PYTHON} "$@"\n'
    )
    bare.chmod(0o755)
    named = tmp_path / "sitecustomize.py"
    named.write_text(f"import sys\nsys.executable = {str(bare)!r}\n")
    wrapper = tmp_path / "wrapped"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {PYTHON} "$@"\n')
    wrapper.chmod(0o755)
    code, output = machine.run("lab-1", machine.requirements("greeting"), python=str(wrapper))
    assert code == 4
    assert "error[S443]" in output
    assert "python3-venv" in output


def test_old_python_is_reported_before_any_download(machine: Machine, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text(
        f"#!/bin/sh\nshift\nexec {PYTHON} -c \"import sys; sys.version_info = (3, 6); sys.version = '3.6.8'; $1\"\n"
    )
    old.chmod(0o755)
    code, output = machine.run("lab-1", machine.requirements("greeting"), python=str(old))
    assert code != 0
    assert output.strip() == "error[S442] Python on this machine is too old: need 3.7 or newer, found 3.6.8"
    assert not machine.environments.exists()


def test_missing_recipe_on_the_coordinator_is_reported(machine: Machine) -> None:
    made = machine.requirements("greeting")
    del machine.blobs[made.recipe]
    code, output = machine.run("lab-1", made)
    assert code == 4
    assert "error[S444]" in output
    assert requirements.MAIN_FILE not in output


def test_setup_is_imported_from_the_wheel_alone(tmp_path: Path) -> None:
    name, data = wheel.build_shoal_wheel()
    (tmp_path / name).write_bytes(data)
    look = "import sys; sys.path.insert(0, sys.argv[1]); import shoal.pack.remote.env_main as it; print(it.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", look, str(tmp_path / name)], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tmp_path / name / "shoal" / "pack" / "remote" / "env_main.py"), done.stderr
