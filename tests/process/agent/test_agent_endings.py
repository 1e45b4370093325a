"""Nothing that an agent started outlives the agent, its warm process, or the request to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.process.agent.agent_stage import until

from shoal.errors import BadNoticeSource

pytestmark = pytest.mark.process

SLEEP = "import time\nprint('up')\ntime.sleep(600)\n"
STUBBORN = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\ntime.sleep(600)\n"
HANDS_OVER = "import signal, sys\nsignal.signal(15, lambda *_: (print('handed over'), sys.exit(0)))\n" + SLEEP
FAILS_LATER = """
import os, sys, time
print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
raise ValueError("failed later")
"""
LEAVES_CHILDREN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import os, signal, time; os.setsid(); [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={})
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2): os.close(fd)
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(0.2)
print("up")
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 600)
"""

LEAVES_ORPHANS = """
import os, signal, subprocess, sys, time
child = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
print("up")
time.sleep(600)
"""


def test_member_may_hand_over_before_it_ends(coordinator, agent, script):
    coordinator.start(script(HANDS_OVER))
    coordinator.line("up")
    coordinator.stop(30.0)
    exit_ = coordinator.exit_of()
    assert (exit_.exit_code, exit_.cause, exit_.detail) == (0, "asked", "stopped by the test")
    assert coordinator.lines() == ["up", "handed over"]


def test_member_that_ignores_sigterm_is_killed_after_the_grace_period(coordinator, agent, script):
    coordinator.start(script(STUBBORN))
    coordinator.line("up")
    coordinator.stop(0.3)
    exit_ = coordinator.exit_of()
    assert (exit_.signal, exit_.cause) == (9, "asked")


def test_suspended_member_is_ended(coordinator, agent, script):
    coordinator.start(script(SLEEP))
    coordinator.line("up")
    os.kill(coordinator.pid_of(), signal.SIGSTOP)
    coordinator.stop(0.2)
    assert coordinator.exit_of().signal in (9, 15)


def member_with_children(coordinator, agent, script, *arguments):
    """Start a member with children that left its session, ignore signals, and were orphaned; return all processes."""
    coordinator.start(script(LEAVES_CHILDREN), *arguments)
    coordinator.line("up")
    processes = agent.remember() - {agent.zygote()}
    assert len(processes) == 3
    return processes


def test_all_descendants_end_with_a_member(coordinator, agent, script):
    members = member_with_children(coordinator, agent, script)
    coordinator.stop(0.2)
    coordinator.exit_of()
    until(lambda: not any(p.is_running() for p in members), "all to end")
    assert agent.zygote().is_running()


def test_orphans_of_a_finished_member_are_killed_and_others_are_spared(coordinator, agent, script):
    coordinator.start(script(LEAVES_CHILDREN, "other.py"), member="lab/1", incarnation="second")
    coordinator.line("up", "lab/1")
    spared = agent.remember() - {agent.zygote()}
    coordinator.start(script(LEAVES_CHILDREN), "0.5")
    coordinator.line("up")
    leftovers = set(psutil.Process(agent.process.pid).children(recursive=True)) - spared - {agent.zygote()}
    assert coordinator.exit_of().exit_code == 0
    until(lambda: not any(p.is_running() for p in leftovers), "all to end")
    assert len(spared) == 3
    assert all(p.is_running() for p in spared)


def test_nothing_survives_a_killed_agent(coordinator, agent, script):
    member_with_children(coordinator, agent, script)
    agent.process.kill()
    until(agent.all_ended, "all to end")


def test_killed_warm_process_ends_its_members_and_is_replaced(coordinator, agent, script):
    members = member_with_children(coordinator, agent, script)
    zygote = agent.zygote()
    zygote.kill()
    exit_ = coordinator.exit_of()
    assert (exit_.signal, exit_.cause) == (9, "infrastructure")
    until(lambda: not any(p.is_running() for p in members), "all to end")
    coordinator.start(script("print('again')", "again.py"), incarnation="second")
    assert coordinator.exit_of(incarnation="second").exit_code == 0
    assert "again" in coordinator.lines()
    assert agent.zygote() != zygote


def test_member_ends_if_agent_and_warm_process_are_killed_at_once(coordinator, agent, script):
    coordinator.start(script(SLEEP))
    coordinator.line("up")
    agent.remember()
    zygote = agent.zygote()
    os.kill(zygote.pid, signal.SIGSTOP)
    agent.process.kill()
    zygote.kill()
    until(agent.all_ended, "all to end")


def kill_with_warm_process(agent):
    """Kill both, so that neither can clean up after the other."""
    zygote = agent.zygote()
    agent.remember()
    zygote.suspend()
    agent.process.kill()
    zygote.kill()
    agent.process.wait()


def test_next_agent_ends_orphans_of_one_that_was_killed_with_its_warm_process(coordinator, agent, start_agent, script):
    coordinator.start(script(LEAVES_ORPHANS))
    coordinator.line("up")
    kill_with_warm_process(agent)
    start_agent()
    until(lambda: len(coordinator.hellos) == 2, "the next agent")
    until(agent.all_ended, "all to end")
    coordinator.start(script("print('again')", "again.py"), incarnation="second")
    assert coordinator.exit_of(incarnation="second").exit_code == 0


def test_second_agent_in_a_directory_spares_the_members_of_the_first(coordinator, agent, start_agent, script):
    coordinator.start(script(LEAVES_ORPHANS))
    coordinator.line("up")
    processes = agent.remember()
    start_agent()
    until(lambda: len(coordinator.hellos) == 2, "the second agent")
    assert all(process.is_running() for process in processes)


def test_sigterm_to_the_agent_is_a_notice_and_members_may_hand_over(coordinator, agent, script):
    text = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(75))\nprint('up')\ntime.sleep(600)"
    coordinator.start(script(text))
    coordinator.line("up")
    agent.remember()
    agent.process.terminate()
    assert agent.process.wait(180) == 0
    assert coordinator.exit_of().cause == "preempted"
    assert any(type(m).__name__ == "MachineNoticeMsg" for m in coordinator.received)
    assert agent.all_ended()


def test_members_that_outlast_the_grace_period_are_killed(coordinator, start_agent, script):
    agent = start_agent("--grace", "0.3")
    coordinator.start(script(STUBBORN))
    coordinator.line("up")
    agent.remember()
    agent.process.terminate()
    assert agent.process.wait(180) == 0
    assert agent.all_ended()
    assert coordinator.exit_of().signal == 9


def test_ending_agent_does_not_wait_for_a_member_that_has_not_started(coordinator, start_agent, script, tmp_path):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    agent = start_agent("--grace", "0.3", preload="endless", environ={b"PYTHONPATH": os.fsencode(path)})
    coordinator.start(script(SLEEP))
    until(lambda: (agent.directory / "logs" / "run").is_dir(), "the request to arrive")
    agent.remember()
    agent.process.terminate()
    assert agent.process.wait(180) == 0
    assert agent.all_ended()
    assert coordinator.exit_of().exit_code is None


def test_closed_lifeline_ends_everything(coordinator, start_agent, script):
    reading, writing = os.pipe()
    agent = start_agent("--lifeline", str(reading), pass_fds=[reading])
    os.close(reading)
    coordinator.start(script(STUBBORN))
    coordinator.line("up")
    agent.remember()
    os.close(writing)
    assert agent.process.wait(180) == 0
    assert agent.all_ended()


def test_shut_down_ends_all_members_and_the_agent(coordinator, start_agent, script):
    from shoal.wire.agent_messages import ShutDownMsg

    agent = start_agent("--grace", "0.3")
    coordinator.start(script(STUBBORN))
    coordinator.line("up")
    agent.remember()
    coordinator.send(ShutDownMsg("the run is over"))
    assert agent.process.wait(180) == 0
    assert agent.all_ended()
    assert coordinator.exit_of().detail == "the run is over"


def test_members_outlive_the_coordinator_and_exits_are_reported_after_reconnect(coordinator, agent, script, tmp_path):
    coordinator.start(script(SLEEP), member="lab/0")
    coordinator.start(script(FAILS_LATER, "b.py"), str(tmp_path / "go"), member="lab/1")
    coordinator.line("up", "lab/0")
    coordinator.line("up", "lab/1")
    pid = coordinator.pid_of()
    coordinator.close()
    (tmp_path / "go").touch()
    until(lambda: "lab/1 of run run ended" in agent.log.read_text(), "the agent to record the exit")
    assert not coordinator.exits()
    coordinator.open()
    exit_ = coordinator.exit_of("lab/1")
    assert (exit_.cause, exit_.detail) == ("user", "ValueError: failed later")
    assert psutil.pid_exists(pid)
    assert coordinator.hellos[-1].members == (("run", "lab/0", "first"),)
    assert "waiting for the coordinator" in agent.log.read_text()


def test_exit_that_may_have_been_lost_is_sent_again(coordinator, agent, script):
    coordinator.start(script("pass"))
    coordinator.exit_of()
    coordinator.close()
    coordinator.received.clear()
    coordinator.open()
    assert coordinator.exit_of().exit_code == 0


def test_idle_agent_gives_up_with_a_cause(coordinator, start_agent):
    coordinator.close()
    agent = start_agent("--idle", "0.5")
    assert agent.process.wait(180) == 4
    assert "error[S207]" in agent.log.read_text()


def test_idle_time_counts_from_the_last_exit_of_a_member(coordinator, start_agent, script, tmp_path):
    start_agent("--idle", "8")
    coordinator.start(script(FAILS_LATER), str(tmp_path / "go"))
    coordinator.line("up")
    pid = coordinator.pid_of()
    coordinator.close()
    time.sleep(9.0)
    (tmp_path / "go").touch()
    until(lambda: not psutil.pid_exists(pid), "the member ended")
    coordinator.open()
    assert coordinator.exit_of().detail == "ValueError: failed later"


@pytest.mark.parametrize("url", ["nonsense", "ftp://host:1", "http://", "http://host:99999999"])
def test_invalid_url_is_reported_at_once(start_agent, url):
    agent = start_agent("--url", url)
    assert agent.process.wait(180) == 4
    assert "error[S207]" in agent.log.read_text()


def test_unusable_directory_is_reported_at_once(start_agent, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    agent = start_agent("--dir", str(tmp_path / "file"))
    assert agent.process.wait(180) == 4
    assert "error[S510]" in agent.log.read_text()


def test_unknown_notice_source_is_reported_at_once(start_agent):
    agent = start_agent("--notice-source", "oracle")
    assert agent.process.wait(180) == 3
    assert f"error[{BadNoticeSource.code}]" in agent.log.read_text()


def test_wrong_token_is_reported_at_once(coordinator, start_agent):
    agent = start_agent(token="another")
    assert agent.process.wait(180) == 4
    assert "error[S201]" in agent.log.read_text()


def test_file_becomes_a_notice(coordinator, start_agent, tmp_path):
    agent = start_agent("--notice-source", f"file:{tmp_path / 'notice'}")
    until(lambda: coordinator.hellos, "a hello")
    (tmp_path / "notice").write_text("120 spot price too high")
    notice = until(
        lambda: next((m for m in coordinator.received if type(m).__name__ == "MachineNoticeMsg"), None), "a notice"
    )
    assert (notice.within_s, notice.source, notice.detail) == (120.0, "file", "spot price too high")
    assert agent.process.poll() is None


def test_warm_start_is_much_faster_than_a_cold_one(coordinator, start_agent, script):
    """Compare with a cold start on the same machine, and take the best of several, so that load does not matter."""
    start_agent(preload="numpy,torch")
    path = script("import time, torch; print('started', time.time())")
    coordinator.start(path, incarnation="first")
    coordinator.exit_of(incarnation="first")

    def start_s(incarnation, **env):
        began = time.time()
        coordinator.received.clear()
        coordinator.start(path, incarnation=incarnation, env=env)
        return float(coordinator.line("started").split()[1]) - began

    warm_s = min(start_s(f"warm{number}") for number in range(4))
    cold_s = start_s("cold", SHOAL_COMPAT="1")
    print(f"warm {warm_s:.3f} s, cold {cold_s:.3f} s")
    assert warm_s < cold_s / 3


def test_process_that_is_not_a_descendant_is_refused():
    from shoal.agent.processes import process_tree
    from shoal.errors import ForeignProcess

    with pytest.raises(ForeignProcess):
        process_tree.own(1)
    child = subprocess.Popen(["sleep", "60"])
    assert process_tree.own(child.pid) is not None
    child.kill()
    child.wait()
    assert process_tree.own(child.pid) is None


def test_agent_uses_the_url_that_answers_and_names_the_cause_of_each_failure(coordinator, start_agent):
    url = f"http://127.0.0.1:{coordinator.port}"
    agent = start_agent("--url", f"http://127.0.0.2:9,http://no.such.host.invalid:9,{url}", "--idle", "0.5")
    until(lambda: "connected to coordinator" in agent.log.read_text(), "the agent to connect")
    assert f"at {url}" in agent.log.read_text()
    coordinator.close()
    assert agent.process.wait(180) == 4
    text = agent.log.read_text()
    assert "error[S230]" in text
    assert "http://127.0.0.2:9: connection refused" in text
    assert "http://no.such.host.invalid:9: the host name cannot be resolved here" in text
    assert f"{url}: connection refused" in text


LATE_START = """
import asyncio, dataclasses, os, sys
from pathlib import Path
from shoal.agent import member_processes
from shoal.agent.processes import process_tree
from shoal.agent.outbox import Outbox
from shoal.wire.agent_messages import MemberExitedMsg, StartMemberMsg

async def main(directory):
    token, cache = str(directory / "token"), directory / "cache"
    context = member_processes.AgentContext("http://127.0.0.1:9", token, directory, 2, "", dict(os.environ), cache)
    outbox = Outbox()
    members = member_processes.MemberProcesses(context, ("gated",), outbox)
    members.open()
    script, cwd = str(directory / "sleep.py"), str(directory)
    request = lambda incarnation: StartMemberMsg("run", "lab/0", incarnation, (script,), cwd, {})
    member_processes.START_WITHIN_S = 0.5
    await members.start(request("first"))
    assert any(isinstance(message, MemberExitedMsg) for message in iter(outbox.take, None))
    (directory / "go").touch()
    member_processes.START_WITHIN_S = 300.0
    await members.start(request("second"))
    while len(process_tree.descendants()) > 2:
        await asyncio.sleep(0.02)
    assert [name[2] for name in members.names] == ["second"]
    await members.warm.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_member_that_starts_after_its_timeout_is_ended(tmp_path):
    (tmp_path / "gated.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.02)\n"
    )
    (tmp_path / "sleep.py").write_text(SLEEP)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", LATE_START, str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=180)
