"""`shoal run` with real coordinators and agents."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from typing import Any

import psutil
import pytest

from shoal.agent.processes import process_tree
from shoal.cli.signals import ONE_REQUEST_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_run_shows_the_output_of_its_members_and_leaves_no_process(stage: Any) -> None:
    ran = stage.shoal("run", "-n", "2", "--compat", "torchrun", "--name", "greet", "hello.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "local/0 | hello from local/0" in ran.stdout
    assert "local/1 | hello from local/1" in ran.stdout
    assert stage.has_no_processes()
    (view,) = stage.runs()
    assert (view["name"], view["status"], view["exit_code"]) == ("greet", "done", 0)
    assert "hello from local/1" in stage.shoal("logs", "greet", "--member", "local/1").stdout
    assert "run ended with exit code 0" in stage.shoal("why", "greet", "--all").stdout
    assert "greet" in stage.shoal("status", "gre").stdout


def test_copies_of_a_script_that_never_calls_shoal_are_an_error(stage: Any) -> None:
    ran = stage.shoal("run", "-n", "2", "hello.py")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "error[S340] hello.py ended without joining the run" in ran.stderr
    assert "run = shoal.join()" in ran.stderr
    assert stage.shoal("run", "hello.py").returncode == 0, "one process is no copy"


def test_environment_variables_reach_the_members(stage: Any) -> None:
    (stage.path / "env.py").write_text("import os\nprint('got', os.environ['A'], os.environ['B'], flush=True)\n")
    (stage.path / "shoal.toml").write_text('[pool.near]\nengine = "local"\n')
    for where in ((), ("--on", "near"), ("--compat", "torchrun")):
        ran = stage.shoal("run", *where, "--env", "A=1", "--env", "B=two words", "env.py")
        assert "| got 1 two words" in ran.stdout, ran.stdout + ran.stderr


def test_advice_for_a_finished_run_is_true(stage: Any) -> None:
    (stage.path / "silent.py").write_text("pass\n")
    ran = stage.shoal("run", "--set", "lease_s=7", "silent.py")
    assert "logs        none: no member printed anything" in ran.stdout
    scaled = stage.shoal("scale", "silent", "2")
    assert (scaled.returncode, "shoal run -n 2:2 silent.py" in scaled.stderr) == (2, True)
    unknown = stage.shoal("logs", "silent", "--member", "local/7")
    assert (unknown.returncode, "its members are local/0" in unknown.stderr) == (2, True)
    assert stage.json("config", "silent")["lease_s"] == 7


def test_script_that_raises_ends_with_exit_code_1_and_its_cause_first(stage: Any) -> None:
    ran = stage.shoal("run", "--set", "restarts.user=0", "raise.py")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert ran.stderr.startswith("cause       local/0: ValueError: no such thing")
    assert stage.has_no_processes()


def test_same_error_of_all_members_is_shown_once_and_not_retried(stage: Any) -> None:
    ran = stage.shoal("run", "-n", "2", "raise.py")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "ValueError: no such thing (and 1 other member)\n" in ran.stderr
    assert ran.stdout.count("| Traceback") == 1
    assert "restarted local" not in ran.stdout
    assert len((ran.stdout + ran.stderr).splitlines()) < 30, ran.stdout + ran.stderr


def test_no_process_outlives_a_killed_shoal_run(stage: Any) -> None:
    process = stage.start("run", "-n", "2", "wait.py")
    stage.until(lambda: stage.out().count("| waiting") == 2, "members run")
    process.kill()
    process.wait()
    stage.until(stage.has_no_processes, "all processes have ended")
    assert [view["status"] for view in stage.runs()] == ["resumable"]


def test_daemon_of_a_member_whose_agent_was_killed_too_is_found_and_ended(stage: Any) -> None:
    daemon = "import subprocess, sys, time\nsubprocess.Popen(['setsid', 'sleep', '300'], start_new_session=True)\n"
    (stage.path / "daemon.py").write_text(daemon + "print('waiting', flush=True)\ntime.sleep(300)\n")
    process = stage.start("run", "daemon.py")
    stage.until(lambda: "| waiting" in stage.out(), "the member runs")
    services = [psutil.Process(process.pid), *stage.processes()]
    services = [service for service in services if any("shoal." in word for word in service.cmdline())]
    for service in services:
        service.suspend()
    for service in services:
        service.kill()
    process.wait()
    stage.until(lambda: not any(map(process_tree.is_alive, services)), "the services have ended")
    found = stage.shoal("doctor", "--end-leftovers")
    assert "(member of " in found.stdout, found.stdout + found.stderr
    assert "killed 1 process" in found.stdout
    assert "no processes of dead runs" in stage.shoal("doctor").stdout


def test_killed_coordinator_is_restarted_at_its_address(stage: Any) -> None:
    process = stage.start("run", "until.py", str(stage.path / "go"))
    stage.until(lambda: "| pid" in stage.out(), "the member runs")
    url = (stage.directory() / "url").read_text()
    stage.process("shoal.coordinator").kill()
    stage.until(
        lambda: "the coordinator died (killed by SIGKILL) and was restarted" in stage.out(), "the restart is reported"
    )
    (stage.path / "go").touch()
    assert process.wait(180) == 0, stage.out()
    assert (stage.directory() / "url").read_text() == url
    assert stage.out().count("| pid") == 1, "the member was restarted"


def test_killed_agent_is_restarted_with_its_members(stage: Any) -> None:
    process = stage.start("run", "until.py", str(stage.path / "go"))
    stage.until(lambda: "| pid" in stage.out(), "the member runs")
    stage.process("shoal.agent").kill()
    stage.until(lambda: stage.out().count("| pid") == 2, "the member runs again")
    (stage.path / "go").touch()
    assert process.wait(180) == 0, stage.out()
    stage.until(stage.has_no_processes, "all processes have ended")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_first_signal_stops_the_run_cleanly(stage: Any, number: signal.Signals) -> None:
    process = stage.start("run", "wait.py")
    stage.until(lambda: "| waiting" in stage.out(), "the member runs")
    process.send_signal(number)
    assert process.wait(180) == 75, stage.out()
    assert "starts over at step 0: there is no checkpoint" in stage.out()
    stage.until(stage.has_no_processes, "all processes have ended")


def test_second_signal_stops_the_run_at_once(stage: Any) -> None:
    process = stage.start("run", "stubborn.py")
    stage.until(lambda: "| waiting" in stage.out(), "the member runs")
    process.send_signal(signal.SIGINT)
    stage.until(lambda: "stopping after a checkpoint" in stage.out(), "the first signal is handled")
    time.sleep(ONE_REQUEST_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(180) != 0, stage.out()
    stage.until(stage.has_no_processes, "all processes have ended")


def test_run_under_nohup_outlives_its_terminal(stage: Any) -> None:
    process = stage.start("run", "until.py", str(stage.path / "go"), shell="trap '' HUP; exec \"$@\"")
    stage.until(lambda: "| pid" in stage.out(), "the member runs")
    process.send_signal(signal.SIGHUP)
    (stage.path / "go").touch()
    assert process.wait(120) == 0, stage.out()


def test_two_signals_of_one_moment_stop_the_run_once(stage: Any) -> None:
    process = stage.start("run", "wait.py")
    stage.until(lambda: "| waiting" in stage.out(), "the member runs")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75, stage.out()
    assert "stopping after a checkpoint; SIGTERM again stops without one" in stage.out()
    assert "stopping now" not in stage.out()


def test_frozen_coordinator_is_given_up_after_a_second_signal(stage: Any) -> None:
    process = stage.start("run", "wait.py")
    stage.until(lambda: "| waiting" in stage.out(), "the member runs")
    stage.process("shoal.coordinator").suspend()
    process.send_signal(signal.SIGINT)
    stage.until(lambda: "so Ctrl-C cannot stop the run" in stage.out(), "the first signal is answered")
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 1, stage.out()
    stage.until(stage.has_no_processes, "all processes have ended")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_run_starts_with_closed_standard_streams(stage: Any, closed: str) -> None:
    process = stage.start("run", "hello.py", shell=f'exec "$@" {closed}')
    assert process.wait(120) == 0, stage.out() + (stage.path / "err").read_text()


def test_detached_run_trains_until_it_is_stopped(stage: Any) -> None:
    ran = stage.shoal("run", "--detach", "--json", "wait.py")
    assert ran.returncode == 0, ran.stderr
    (view,) = stage.runs()
    assert view["status"] not in ("done", "failed", "stopped")
    stage.until(lambda: "waiting" in stage.shoal("logs").stdout, "the member runs")
    assert [node["agent"]["agent"] for node in stage.json("nodes")] == ["local"]
    stopped = stage.shoal("stop", view["run"], "--now")
    assert stopped.returncode == 0, stopped.stderr
    assert "no checkpoint" in stopped.stdout
    assert "starts over at step 0" in stopped.stdout
    stage.until(stage.has_no_processes, "all processes have ended")
    assert [view["status"] for view in stage.runs()] == ["stopped"]


def test_coordinator_of_a_detached_run_is_restarted(stage: Any) -> None:
    assert stage.shoal("run", "--detach", "until.py", str(stage.path / "go")).returncode == 0
    stage.until(lambda: "pid" in stage.shoal("logs").stdout, "the member runs")
    stage.process("shoal.coordinator").kill()
    (stage.path / "go").touch()
    stage.until(lambda: [view["status"] for view in stage.runs()] == ["done"], "the run is done")
    stage.until(stage.has_no_processes, "all processes have ended")


def test_scale_adds_members_without_a_restart(stage: Any) -> None:
    process = stage.start("run", "-n", "1:1", "until.py", str(stage.path / "go"))
    stage.until(lambda: stage.out().count("| pid") == 1, "the member runs")
    scaled = stage.shoal("scale", "until", "1:2")
    assert scaled.returncode == 0, scaled.stderr
    stage.until(lambda: stage.out().count("| pid") == 2, "another member runs")
    assert stage.shoal("stop", "until", "--now").returncode == 0
    assert process.wait(180) == 75


def test_stopped_run_is_resumed_with_another_number_of_members(stage: Any) -> None:
    process = stage.start("run", "until.py", str(stage.path / "go"))
    stage.until(lambda: "| pid" in stage.out(), "the member runs")
    assert stage.shoal("stop", "until", "--now").returncode == 0
    assert process.wait(180) == 75
    scaled = stage.shoal("scale", "until", "2")
    assert scaled.returncode == 2
    assert "shoal resume until-" in scaled.stderr
    process = stage.start("resume", "until", "-n", "2")
    stage.until(lambda: stage.out().count("| pid") == 2, "two members run")
    assert stage.shoal("stop", "until", "--now").returncode == 0
    assert process.wait(180) == 75, stage.out()


def test_resume_does_not_use_a_coordinator_that_is_shutting_down(stage: Any) -> None:
    (stage.path / "shoal.toml").write_text('[pool.near]\nengine = "local"\n')
    process = stage.start("run", "--on", "near", "until.py", str(stage.path / "go"))
    stage.until(lambda: "| pid" in stage.out(), "the member runs")
    process.send_signal(signal.SIGSTOP)
    assert stage.shoal("stop", "until", "--now").returncode == 0
    resumed = stage.start("resume", "until", "--detach")
    with contextlib.suppress(subprocess.TimeoutExpired):
        # The stopped supervisor keeps that coordinator up; a resume that used it would return by now.
        resumed.wait(5)
    process.send_signal(signal.SIGCONT)
    assert process.wait(180) == 75, "the command that started the run saw it end"
    assert resumed.wait(180) == 0
    (stage.path / "go").touch()
    stage.until(lambda: [view["status"] for view in stage.runs()] == ["done"], "the run is done")
    stage.until(stage.has_no_processes, "all processes have ended")


def test_module_is_run_like_a_script(stage: Any) -> None:
    package = stage.path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys\nprint('module', __name__, sys.argv[1:], flush=True)\n")
    ran = stage.shoal("run", "-m", "mine.train", "--lr", "1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "local/0 | module __main__ ['--lr', '1']" in ran.stdout
