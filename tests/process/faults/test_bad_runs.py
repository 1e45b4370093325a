"""Bad input, end to end: each error has a code, a cause and a remedy, and harms no other process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.process.faults.checked_run import SCRIPT, CheckedRun, checked_run

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

DIFFERENCE = r"parameters: 0\.weight float64 \d+x16 in the run, 0\.weight float64 \d+x16 on local/\d"


def check_error(text: str, code: str, why: str, do: str) -> None:
    """Fail unless the output names the error, its cause and a remedy."""
    assert f"error[{code}]" in text, text[-3000:]
    assert re.search(why, text), text[-3000:]
    assert re.search(do, text), text[-3000:]
    assert f"shoal explain {code}" in text


def command(path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", *arguments],
        env={**os.environ, "SHOAL_HOME": str(path / "home"), "TERM": "dumb", **environ},
        cwd=path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


# --- members that do not fit into a run


def test_member_with_a_different_model_is_left_out_and_the_others_train(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", widths={"local/2": 48}, pause_s=0.02) as run:
        run.finish()
        run.check()
        check_error(run.output, "S206", DIFFERENCE, "start every member from the same script")
        assert {c["member"] for c in run.commits()} == {"local/0", "local/1"}
        started = [e for e in run.journal() if e["kind"] == "ProcessStarted" and e["fields"]["member"] == "local/2"]
        assert len(started) == 1, "a member that cannot match was retried"


def test_member_with_other_samples_is_refused_and_the_run_continues(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", data_seeds={"local/2": 7}, pause_s=0.02) as run:
        run.finish()
        run.check()
        check_error(run.output, "S206", "data: sample", "give generated data and random_split a seed")


def test_run_ends_with_the_cause_if_too_few_members_match(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:2", widths={"local/1": 48}) as run:
        run.finish(exit_code=1)
        check_error(run.output, "S206", DIFFERENCE, "start every member from the same script")
        assert not run.commits()


def test_dataset_smaller_than_the_batch_is_reported(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:2", ("restarts.user=0",), samples=40, batch=64) as run:
        run.finish(exit_code=1)
        check_error(run.output, "S303", "40 samples", "batch|size")
        assert not run.commits()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nccl_without_a_gpu_is_refused_at_once(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:2", ("exchange=nccl",)) as run:
        run.finish(exit_code=1)
        check_error(run.output, "S104", "no GPU|no NCCL", "exchange=ring")
        assert not run.commits()


IMPOSTORS = {
    "another run": ({"SHOAL_RUN": "elsewhere"}, "S203"),
    "the name of a member": ({"SHOAL_MEMBER": "local/0"}, "S205"),
    "another version": ({"PRETEND": "9.9.9"}, "S202"),
    "a wrong token": ({"SHOAL_TOKEN_FILE": "wrong"}, "S201"),
}


def start_impostor(run: CheckedRun, changes: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the script by hand with the environment that an agent would give it, but for the changes."""
    directory = next(run.home.glob("coordinators/*"))
    (directory / "wrong").write_text("not-the-token\n")
    ours = {
        "SHOAL_URL": (directory / "url").read_text().strip(),
        "SHOAL_TOKEN_FILE": "token",
        "SHOAL_RUN": next((directory / "runs").iterdir()).name,
        "SHOAL_MEMBER": "stranger/0",
        "SHOAL_INCARNATION": "stranger",
        "SHOAL_MEMBER_HOSTS": "127.0.0.1",
        "SHOAL_RUN_DIR": str(directory),
        "PRETEND": "",
    } | changes
    ours["SHOAL_TOKEN_FILE"] = str(directory / ours["SHOAL_TOKEN_FILE"])
    pretend = "import os, runpy, shoal; shoal.__version__ = os.environ['PRETEND'] or shoal.__version__;"
    return subprocess.run(
        [sys.executable, "-c", f"{pretend} runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"],
        env={**run.environ, **ours},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )


@pytest.mark.timeout(600)
def test_unauthorised_processes_are_rejected_and_the_run_is_not_disturbed(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:2", ("lease_s=60",), pause_s=0.05, epochs=2000) as run:
        run.until_size(2)
        for case, (changes, code) in IMPOSTORS.items():
            at = run.step()
            done = start_impostor(run, changes)
            assert done.returncode != 0, case
            assert f"error[{code}]" in done.stderr, (case, done.stderr)
            assert f"shoal explain {code}" in done.stderr
            assert re.search(r"^  (why|do) ", done.stderr, re.MULTILINE), (case, done.stderr)
            run.until(lambda at=at: run.step() > at, f"a step after {case}")
        assert {c["world"] for c in run.commits()} == {1}, "an impostor changed the world"
        name = run.shoal("ps")[0]["run"]
        run.shoal("stop", name)
        run.finish(exit_code=75)
        run.check_steps(run.step() + 1)


# --- runs that cannot start


def test_missing_script_is_reported_and_nothing_is_created(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = command(tmp_path, "run", "trian.py")
    assert done.returncode == 2
    check_error(done.stderr, "S111", "no such script: trian.py", "did you mean train.py")
    assert not (tmp_path / "home").exists()


def test_script_that_another_machine_lacks_is_reported(tmp_path: Path) -> None:
    """Remove the submitted script before members look for it."""
    script = tmp_path / "gone.py"
    script.write_text("")
    with standing(tmp_path) as access:
        assert command(tmp_path, "run", *access, "--detach", "--set", "restarts.user=0", str(script)).returncode == 0
        script.unlink()
        joined = join(tmp_path, access)
        try:
            shown = command(tmp_path, "status", "gone", *access, "--json")
            for _ in range(200):
                if '"failed"' in (shown := command(tmp_path, "status", "gone", *access, "--json")).stdout:
                    break
            assert '"failed"' in shown.stdout
            assert "gone.py" in command(tmp_path, "why", "gone", "--all", *access).stdout
            assert joined.poll() is None, "the agent ended with the run"
        finally:
            joined.terminate()
            joined.wait(180)


def test_port_in_use_is_reported_and_its_owner_continues(tmp_path: Path) -> None:
    with standing(tmp_path) as access:
        port = access[1].rpartition(":")[2]
        other = command(tmp_path, "coordinator", "--port", port)
        assert other.returncode == 4
        check_error(other.stderr, "S420", "in use", "--port")
        assert command(tmp_path, "ps", *access).returncode == 0
        assert len(list((tmp_path / "home" / "coordinators").iterdir())) == 1, "the failed coordinator left files"


@contextlib.contextmanager
def standing(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the options that reach a standing coordinator."""
    environ = {**os.environ, "SHOAL_HOME": str(path / "home")}
    words = [sys.executable, "-m", "shoal.cli.main", "--json", "coordinator"]
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        printed = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        yield ("--url", printed["url"], "--token-file", printed["token_file"])
    finally:
        process.terminate()
        process.wait(180)


def join(path: Path, access: tuple[str, ...]) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "SHOAL_HOME": str(path / "home"), "SHOAL_PRELOAD": "json"}
    words = [sys.executable, "-m", "shoal.cli.main", "join", *access[1:], "--slots", "1"]
    return subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# --- directories that cannot be written


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """Yield a directory that no process can write to; against root that takes a read-only file system."""
    path.mkdir()
    if os.geteuid() != 0:
        path.chmod(0o500)
        yield path
        return
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(path)], check=False).returncode:
        pytest.skip("root can write anywhere, and no read-only file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_read_only_home_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with read_only(tmp_path / "fixed") as home:
        for words in (("run", "train.py"), ("coordinator",)):
            done = command(tmp_path, *words, SHOAL_HOME=str(home))
            assert done.returncode == 4
            check_error(done.stderr, "S510", "[Rr]ead-only|[Pp]ermission", "SHOAL_HOME")


def test_read_only_checkpoint_directory_is_reported_and_training_continues(tmp_path: Path) -> None:
    with read_only(tmp_path / "fixed") as place:
        settings: Any = ("checkpoint.every_steps=4", f"checkpoint.to={place}")
        with checked_run(tmp_path / "stage", "2:2", settings, epochs=2) as run:
            run.finish()
            run.check()
            assert re.search("S50[23]", run.output), run.output
            assert re.search("[Rr]ead-only|[Pp]ermission", run.output), run.output
