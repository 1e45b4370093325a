"""Environments as machines really make them: once, whole or not at all, and with a clear word if it cannot be."""

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

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

UP = "usage: shoal.agent"


def test_two_at_once_build_one_and_the_third_finds_it(machine: Machine) -> None:
    """What is locked by hashes is installed as it is, and what it lacks for Shoal is added."""
    file = next(machine.wheels.glob("greeting-*.whl"))
    made = machine.requirements(f"greeting==1.0 --hash=sha256:{machine.put(file)}")
    both = [machine.hire(name, made) for name in ("lab-1", "lab-2")]
    assert [one.wait(100) for one in both] == [0, 0], machine.log("lab-1") + machine.log("lab-2")
    assert all(UP in machine.log(name) for name in ("lab-1", "lab-2"))
    said = machine.log("lab-1") + machine.log("lab-2")
    assert said.count("builds its environment from requirements.txt") == 2
    assert said.count("which builds its environment from requirements.txt") == 1, "the other waits for it"
    told = len(machine.told)
    assert told >= 2
    code, said = machine.ended("lab-3", made)
    assert (code, UP in said, len(machine.told)) == (0, True, told), said
    show = "import greeting, shoal; print(greeting.WORDS, shoal.__file__)"
    shown = subprocess.run([machine.python(), "-B", "-c", show], capture_output=True, text=True, env={})
    assert shown.stdout.startswith(f"hello {machine.environments}"), shown.stderr
    inside = machine.environments / machine.folders()[0]
    assert {one.name for one in inside.iterdir()} == {"log", "python", "ready", "used", "venv"}
    assert [one.name for one in machine.environments.glob("*.whl")] == [f"shoal-{made.shoal[:20]}.whl"]
    assert not list(inside.rglob("greeting.*.pyc")), "pip heard what this machine tells it"


def test_what_cannot_be_installed_is_told_and_leaves_nothing(machine: Machine) -> None:
    code, said = machine.ended("lab-1", machine.requirements("no-such-thing==9"))
    assert code == 4
    assert "error[S441] requirements.txt cannot be installed on" in said
    assert "No matching distribution found for no-such-thing==9" in said
    (why,) = machine.failures()
    assert "No matching distribution found for no-such-thing==9; correct requirements.txt (shoal explain S441)" in why
    assert machine.folders() == []
    (log,) = machine.environments.glob("*.log")
    assert str(log) in said
    assert "no-such-thing" in log.read_text()


def test_a_password_in_a_line_that_pip_does_not_understand_is_not_told(machine: Machine) -> None:
    code, said = machine.ended("lab-1", machine.requirements("--index https://ada:pa55word@example.org/simple --foo"))
    assert code == 4
    assert "error[S441]" in said
    assert "https://****@example.org/simple" in said
    assert "pa55word" not in said
    assert "pa55word" not in str(machine.told)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """A packed environment with what Shoal needs, and a script to be run where it is unpacked."""
    folder = tmp_path_factory.mktemp("packed")
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (site,) = (folder / "env").glob("lib/*/site-packages")
    for one in wheels.glob("*.whl"):
        with zipfile.ZipFile(one) as archive:
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
            filter=lambda one: None if any(part in one.name for part in leave_out) else one,
        )
    return path


def begun(
    machine: Machine, packed: Path, made: recipe.PublishedEnvironment, *, lifeline: bool = False
) -> subprocess.Popen[bytes]:
    """A hire in the middle of a build that would take for ever."""
    (packed / "wait").touch()
    process = machine.hire("lab-1", made, lifeline=lifeline)
    until(lambda: any("sleep" in one.cmdline() for one in running(process.pid)), "the build")
    (packed / "wait").unlink()
    return process


def test_a_hire_that_is_cancelled_while_it_builds_leaves_nothing(machine: Machine, packed: Path) -> None:
    process = begun(machine, packed, recipe.publish(str(archive(packed, "env.tar.gz")), machine.put))
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    until(lambda: not running(process.pid), "the end of all that it started")
    assert machine.folders() == []
    assert not machine.failures()


def test_a_hire_whose_actor_is_lost_while_it_builds_leaves_nothing(machine: Machine, packed: Path) -> None:
    made = recipe.publish(str(archive(packed, "env.tar.gz")), machine.put)
    process = begun(machine, packed, made, lifeline=True)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 128 + signal.SIGTERM
    until(lambda: not running(process.pid), "the end of all that it started")
    assert machine.folders() == []


def test_what_a_killed_build_left_is_not_used(machine: Machine, packed: Path) -> None:
    made = recipe.publish(str(archive(packed, "env.tar.gz")), machine.put)
    process = begun(machine, packed, made)
    process.kill()
    process.wait(20)
    until(lambda: not any("conda-unpack" in str(one.cmdline()) for one in running(process.pid)), "its end")
    for one in running(process.pid):
        one.kill()
    (left,) = machine.folders()
    code, said = machine.ended("lab-2", made)
    assert (code, UP in said) == (0, True), said
    (ready,) = machine.environments.glob("archive-*.ready")
    assert ready.read_text() in set(machine.folders()) - {left}


@pytest.mark.parametrize("name", ["conda.tar.gz", "plain.tgz"])
def test_a_packed_environment_is_unpacked_once_and_shoal_comes_beside_it(
    machine: Machine, packed: Path, name: str
) -> None:
    made = recipe.publish(str(archive(packed, name)), machine.put)
    for hire in ("lab-1", "lab-2"):
        code, said = machine.ended(hire, made)
        assert (code, UP in said) == (0, True), said
    (folder,) = machine.folders()
    (mark,) = (machine.environments / folder).rglob("unpacked")
    assert mark.read_text() == str(mark.parent), "it was mended in the place where it is used"


def test_a_packed_environment_that_is_no_good_says_why(machine: Machine, packed: Path) -> None:
    whole = archive(packed, "conda.tar.gz")
    cut = packed / "cut.tar.gz"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    spoilt = archive(packed, "spoilt.tar.xz", how="xz")
    middle = spoilt.stat().st_size // 2
    spoilt.write_bytes(spoilt.read_bytes()[:middle] + b"\xff" * 64 + spoilt.read_bytes()[middle + 64 :])
    for number, (path, code, words) in enumerate(
        [
            (cut, "S540", "cut.tar.gz cannot be unpacked"),
            (spoilt, "S540", "spoilt.tar.xz cannot be unpacked"),
            (archive(packed, "none.tar.gz", "/bin/python"), "S540", "there is no bin/python in it"),
            (archive(packed, "poor.tar.gz", "_here.pth"), "S445", "No module named"),
        ]
    ):
        exit_code, said = machine.ended(f"lab-{number}", recipe.publish(str(path), machine.put))
        assert exit_code == 4, said
        assert f"error[{code}]" in said
        assert words in said
    assert machine.folders() == []


def test_what_a_pex_finds_the_agent_finds(machine: Machine, wheels: Path, tmp_path: Path) -> None:
    path = tmp_path / "app.pex"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("__main__.py", PEX)
        for one in wheels.glob("*.whl"):
            made.write(one, f".deps/{one.name}")
    code, said = machine.ended("lab-1", recipe.publish(str(path), machine.put))
    assert (code, UP in said) == (0, True), said
    shown = subprocess.run([machine.python(), "-c", "import greeting; print(greeting.WORDS)"], capture_output=True)
    assert shown.stdout == b"hello\n", shown.stderr


# What a .pex does when it is asked to be an interpreter: it unpacks what it holds, and puts it on the path.
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


def test_a_python_without_venv_says_what_to_install(machine: Machine, tmp_path: Path) -> None:
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
    code, said = machine.ended("lab-1", machine.requirements("greeting"), python=str(wrapper))
    assert code == 4
    assert "error[S443]" in said
    assert "python3-venv" in said


def test_a_python_that_is_too_old_is_told_so_before_anything_else(machine: Machine, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text(
        f"#!/bin/sh\nshift\nexec {PYTHON} -c \"import sys; sys.version_info = (3, 6); sys.version = '3.6.8'; $1\"\n"
    )
    old.chmod(0o755)
    code, said = machine.ended("lab-1", machine.requirements("greeting"), python=str(old))
    assert code != 0
    assert said.strip() == "error[S442] Python on this machine is too old: need 3.7 or newer, found 3.6.8"
    assert not machine.environments.exists()


def test_a_coordinator_that_has_it_not_is_named(machine: Machine) -> None:
    made = machine.requirements("greeting")
    del machine.blobs[made.recipe]
    code, said = machine.ended("lab-1", made)
    assert code == 4
    assert "error[S444]" in said
    assert requirements.MAIN_FILE not in said


def test_what_runs_on_machines_is_found_in_the_wheel_alone(tmp_path: Path) -> None:
    name, data = wheel.build_shoal_wheel()
    (tmp_path / name).write_bytes(data)
    look = "import sys; sys.path.insert(0, sys.argv[1]); import shoal.pack.remote.env_main as it; print(it.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", look, str(tmp_path / name)], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tmp_path / name / "shoal" / "pack" / "remote" / "env_main.py"), done.stderr
