"""Nothing that an agent started outlives it, its warm process, or the order to end."""

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
POLITE = "import signal, sys\nsignal.signal(15, lambda *_: (print('handed over'), sys.exit(0)))\n" + SLEEP
MEANWHILE = """
import os, sys, time
print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
raise ValueError("meanwhile")
"""
FAMILY = """
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

OFFSPRING = """
import os, signal, subprocess, sys, time
child = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
print("up")
time.sleep(600)
"""


def test_a_member_may_hand_over_before_it_goes(coordinator, agent, script):
    coordinator.start(script(POLITE))
    coordinator.line("up")
    coordinator.end(30.0)
    exit_ = coordinator.exit_of()
    assert (exit_.exit_code, exit_.cause, exit_.detail) == (0, "asked", "a test wants it")
    assert coordinator.lines() == ["up", "handed over"]


def test_a_member_that_ignores_sigterm_is_killed_after_the_grace(coordinator, agent, script):
    coordinator.start(script(STUBBORN))
    coordinator.line("up")
    coordinator.end(0.3)
    exit_ = coordinator.exit_of()
    assert (exit_.signal, exit_.cause) == (9, "asked")


def test_a_stopped_member_is_ended_too(coordinator, agent, script):
    coordinator.start(script(SLEEP))
    coordinator.line("up")
    os.kill(coordinator.pid_of(), signal.SIGSTOP)
    coordinator.end(0.2)
    assert coordinator.exit_of().signal in (9, 15)


def family(coordinator, agent, script, *arguments):
    """A member with children that left its session, ignore signals, and were orphaned."""
    coordinator.start(script(FAMILY), *arguments)
    coordinator.line("up")
    seen = agent.remember() - {agent.zygote()}
    assert len(seen) == 3
    return seen


def test_the_whole_family_goes_with_a_member(coordinator, agent, script):
    members = family(coordinator, agent, script)
    coordinator.end(0.2)
    coordinator.exit_of()
    until(lambda: not any(p.is_running() for p in members), "all gone")
    assert agent.zygote().is_running()


def test_what_a_finished_member_leaves_behind_is_killed_and_others_are_spared(coordinator, agent, script):
    coordinator.start(script(FAMILY, "other.py"), member="lab/1", incarnation="two")
    coordinator.line("up", "lab/1")
    spared = agent.remember() - {agent.zygote()}
    coordinator.start(script(FAMILY), "0.5")
    coordinator.line("up")
    leftovers = set(psutil.Process(agent.process.pid).children(recursive=True)) - spared - {agent.zygote()}
    assert coordinator.exit_of().exit_code == 0
    until(lambda: not any(p.is_running() for p in leftovers), "all gone")
    assert len(spared) == 3
    assert all(p.is_running() for p in spared)


def test_nothing_survives_a_killed_agent(coordinator, agent, script):
    family(coordinator, agent, script)
    agent.process.kill()
    until(agent.all_gone, "all gone")


def test_a_killed_warm_process_takes_its_members_along_and_another_takes_over(coordinator, agent, script):
    members = family(coordinator, agent, script)
    zygote = agent.zygote()
    zygote.kill()
    exit_ = coordinator.exit_of()
    assert (exit_.signal, exit_.cause) == (9, "infrastructure")
    until(lambda: not any(p.is_running() for p in members), "all gone")
    coordinator.start(script("print('again')", "again.py"), incarnation="two")
    assert coordinator.exit_of(incarnation="two").exit_code == 0
    assert "again" in coordinator.lines()
    assert agent.zygote() != zygote


def test_a_member_dies_even_if_agent_and_warm_process_are_killed_at_once(coordinator, agent, script):
    coordinator.start(script(SLEEP))
    coordinator.line("up")
    agent.remember()
    zygote = agent.zygote()
    os.kill(zygote.pid, signal.SIGSTOP)
    agent.process.kill()
    zygote.kill()
    until(agent.all_gone, "all gone")


def killed_with_its_warm_process(agent):
    """Neither has the time to clean up after the other."""
    zygote = agent.zygote()
    agent.remember()
    zygote.suspend()
    agent.process.kill()
    zygote.kill()
    agent.process.wait()


def test_the_next_agent_ends_what_was_left_by_one_that_was_killed_with_its_warm_process(
    coordinator, agent, start_agent, script
):
    coordinator.start(script(OFFSPRING))
    coordinator.line("up")
    killed_with_its_warm_process(agent)
    start_agent()
    until(lambda: len(coordinator.hellos) == 2, "the next is there")
    until(agent.all_gone, "all gone")
    coordinator.start(script("print('again')", "again.py"), incarnation="two")
    assert coordinator.exit_of(incarnation="two").exit_code == 0


def test_a_second_agent_in_a_directory_leaves_the_members_of_the_first_alone(coordinator, agent, start_agent, script):
    coordinator.start(script(OFFSPRING))
    coordinator.line("up")
    seen = agent.remember()
    start_agent()
    until(lambda: len(coordinator.hellos) == 2, "the second is there")
    assert all(process.is_running() for process in seen)


def test_sigterm_to_the_agent_is_a_notice_and_members_may_hand_over(coordinator, agent, script):
    text = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(75))\nprint('up')\ntime.sleep(600)"
    coordinator.start(script(text))
    coordinator.line("up")
    agent.remember()
    agent.process.terminate()
    assert agent.process.wait(30) == 0
    assert coordinator.exit_of().cause == "preempted"
    assert any(type(m).__name__ == "MachineNoticeMsg" for m in coordinator.heard)
    assert agent.all_gone()


def test_members_that_do_not_go_within_the_grace_are_killed(coordinator, start_agent, script):
    agent = start_agent("--grace", "0.3")
    coordinator.start(script(STUBBORN))
    coordinator.line("up")
    agent.remember()
    agent.process.terminate()
    assert agent.process.wait(30) == 0
    assert agent.all_gone()
    assert coordinator.exit_of().signal == 9


def test_an_agent_that_is_to_end_does_not_wait_for_a_member_that_is_yet_to_be_born(
    coordinator, start_agent, script, tmp_path
):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    agent = start_agent("--grace", "0.3", preload="endless", environ={b"PYTHONPATH": os.fsencode(path)})
    coordinator.start(script(SLEEP))
    until(lambda: (agent.directory / "logs" / "run").is_dir(), "the order to arrive")
    agent.remember()
    agent.process.terminate()
    assert agent.process.wait(60) == 0
    assert agent.all_gone()
    assert coordinator.exit_of().exit_code is None


def test_a_cut_lifeline_ends_everything(coordinator, start_agent, script):
    reading, writing = os.pipe()
    agent = start_agent("--lifeline", str(reading), pass_fds=[reading])
    os.close(reading)
    coordinator.start(script(STUBBORN))
    coordinator.line("up")
    agent.remember()
    os.close(writing)
    assert agent.process.wait(30) == 0
    assert agent.all_gone()


def test_told_to_shut_down_it_ends_all_and_goes(coordinator, start_agent, script):
    from shoal.wire.agent_messages import ShutDownMsg

    agent = start_agent("--grace", "0.3")
    coordinator.start(script(STUBBORN))
    coordinator.line("up")
    agent.remember()
    coordinator.tell(ShutDownMsg("the run is over"))
    assert agent.process.wait(30) == 0
    assert agent.all_gone()
    assert coordinator.exit_of().detail == "the run is over"


def test_members_outlive_a_coordinator_and_an_exit_meanwhile_is_told_later(coordinator, agent, script, tmp_path):
    coordinator.start(script(SLEEP), member="lab/0")
    coordinator.start(script(MEANWHILE, "b.py"), str(tmp_path / "go"), member="lab/1")
    coordinator.line("up", "lab/0")
    coordinator.line("up", "lab/1")
    pid = coordinator.pid_of()
    coordinator.close()
    (tmp_path / "go").touch()
    until(lambda: not psutil.pid_exists(coordinator.pid_of("lab/1")), "the second member ended")
    assert not coordinator.exits()
    coordinator.open()
    exit_ = coordinator.exit_of("lab/1")
    assert (exit_.cause, exit_.detail) == ("user", "ValueError: meanwhile")
    assert psutil.pid_exists(pid)
    assert coordinator.hellos[-1].members == (("run", "lab/0", "one"),)
    assert "waiting for the coordinator" in agent.log.read_text()


def test_an_exit_that_may_have_been_lost_is_told_again(coordinator, agent, script):
    coordinator.start(script("pass"))
    coordinator.exit_of()
    coordinator.close()
    coordinator.heard.clear()
    coordinator.open()
    assert coordinator.exit_of().exit_code == 0


def test_an_idle_agent_gives_up_with_a_cause(coordinator, start_agent):
    coordinator.close()
    agent = start_agent("--idle", "0.5")
    assert agent.process.wait(30) == 4
    assert "error[S207]" in agent.log.read_text()


def test_the_patience_of_an_agent_counts_from_its_last_member(coordinator, start_agent, script, tmp_path):
    start_agent("--idle", "8")
    coordinator.start(script(MEANWHILE), str(tmp_path / "go"))
    coordinator.line("up")
    pid = coordinator.pid_of()
    coordinator.close()
    time.sleep(9.0)
    (tmp_path / "go").touch()
    until(lambda: not psutil.pid_exists(pid), "the member ended")
    coordinator.open()
    assert coordinator.exit_of().detail == "ValueError: meanwhile"


@pytest.mark.parametrize("url", ["nonsense", "ftp://host:1", "http://", "http://host:99999999"])
def test_a_url_that_is_none_is_told_at_once(start_agent, url):
    agent = start_agent("--url", url)
    assert agent.process.wait(30) == 4
    assert "error[S207]" in agent.log.read_text()


def test_a_directory_that_cannot_be_used_is_told_at_once(start_agent, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    agent = start_agent("--dir", str(tmp_path / "file"))
    assert agent.process.wait(30) == 4
    assert "error[S510]" in agent.log.read_text()


def test_an_unknown_source_of_notices_is_told_at_once(start_agent):
    agent = start_agent("--notice-source", "oracle")
    assert agent.process.wait(30) == 3
    assert f"error[{BadNoticeSource.code}]" in agent.log.read_text()


def test_a_wrong_token_is_told_at_once(coordinator, start_agent):
    agent = start_agent(token="another")
    assert agent.process.wait(30) == 4
    assert "error[S201]" in agent.log.read_text()


def test_a_notice_file_becomes_a_notice(coordinator, start_agent, tmp_path):
    agent = start_agent("--notice-source", f"file:{tmp_path / 'notice'}")
    until(lambda: coordinator.hellos)
    (tmp_path / "notice").write_text("120 spot price too high")
    notice = until(lambda: next((m for m in coordinator.heard if type(m).__name__ == "MachineNoticeMsg"), None))
    assert (notice.within_s, notice.source, notice.detail) == (120.0, "file", "spot price too high")
    assert agent.process.poll() is None


def test_a_start_from_the_warm_process_is_a_matter_of_milliseconds(coordinator, start_agent, script):
    """Compared with a cold start in the same run, and the best of several, so that a busy machine does not matter."""
    start_agent(preload="numpy,torch")
    path = script("import time, torch; print('born', time.time())")
    coordinator.start(path, incarnation="first")
    coordinator.exit_of(incarnation="first")

    def start_s(incarnation, **env):
        began = time.time()
        coordinator.heard.clear()
        coordinator.start(path, incarnation=incarnation, env=env)
        return float(coordinator.line("born").split()[1]) - began

    warm_s = min(start_s(f"warm{number}") for number in range(4))
    cold_s = start_s("cold", SHOAL_COMPAT="1")
    print(f"warm {warm_s:.3f} s, cold {cold_s:.3f} s")
    assert warm_s < cold_s / 3


def test_ending_refuses_a_process_that_is_not_a_descendant():
    from shoal.agent.processes import process_tree
    from shoal.errors import ForeignProcess

    with pytest.raises(ForeignProcess):
        process_tree.own(1)
    child = subprocess.Popen(["sleep", "60"])
    assert process_tree.own(child.pid) is not None
    child.kill()
    child.wait()
    assert process_tree.own(child.pid) is None


def test_an_agent_takes_the_url_that_answers_and_one_that_finds_none_names_the_cause_of_each(coordinator, start_agent):
    url = f"http://127.0.0.1:{coordinator.port}"
    agent = start_agent("--url", f"http://127.0.0.2:9,http://no.such.host.invalid:9,{url}", "--idle", "0.5")
    until(lambda: "linked to coordinator" in agent.log.read_text(), "the agent is linked")
    assert f"at {url}" in agent.log.read_text()
    coordinator.close()
    assert agent.process.wait(30) == 4
    told = agent.log.read_text()
    assert "error[S230]" in told
    assert "http://127.0.0.2:9: refused" in told
    assert "http://no.such.host.invalid:9: the name is not known here" in told
    assert f"{url}: refused" in told


GIVEN_UP = """
import asyncio, dataclasses, os, sys
from pathlib import Path
from shoal.agent import member_processes
from shoal.agent.processes import process_tree
from shoal.agent.outbox import Outbox
from shoal.wire.agent_messages import MemberExitedMsg, StartMemberMsg

async def main(here):
    token, cache = str(here / "token"), here / "cache"
    home = member_processes.AgentContext("http://127.0.0.1:9", token, here, 2, "", dict(os.environ), cache)
    outbox = Outbox()
    crew = member_processes.MemberProcesses(home, ("gated",), outbox)
    crew.open()
    order = lambda incarnation: StartMemberMsg("run", "lab/0", incarnation, (str(here / "sleep.py"),), str(here), {})
    member_processes.START_WITHIN_S = 0.5
    await crew.start(order("one"))
    assert any(isinstance(message, MemberExitedMsg) for message in iter(outbox.take, None))
    (here / "go").touch()
    member_processes.START_WITHIN_S = 300.0
    await crew.start(order("two"))
    while len(process_tree.descendants()) > 2:
        await asyncio.sleep(0.02)
    assert [name[2] for name in crew.names] == ["two"]
    await crew.warm.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_member_that_is_born_after_its_start_was_given_up_is_ended(tmp_path):
    (tmp_path / "gated.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.02)\n"
    )
    (tmp_path / "sleep.py").write_text(SLEEP)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", GIVEN_UP, str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=60)
