"""Members run like `python script.py`, and their exits are classified."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from tests.process.agent.agent_stage import until

from shoal.wire import agent_messages

pytestmark = pytest.mark.process

DESCRIBE = """
import os, sys, multiprocessing
print("argv", sys.argv[1:])
print("name", __name__, os.path.basename(__file__), os.path.basename(sys.path[0]))
print("cwd", os.path.basename(os.getcwd()))
print("stdin", repr(sys.stdin.read()))
print("session", os.getsid(0) == os.getpid())
print("main", sys.modules["__main__"].__dict__ is globals())
import beside
print("beside", beside.value)
print("environ", os.environ["SHOAL_MEMBER"], os.environ["MINE"], os.environ["SHOAL_MEMBER_HOSTS"])
print("handlers", __import__("signal").getsignal(15), __import__("signal").pthread_sigmask(0, []))
sys.exit(0)
"""

TORCH = """
import torch
from torch.utils.data import DataLoader
a = torch.ones(300, 300, requires_grad=True)
(a @ torch.ones(300, 300)).sum().backward()
print("threads", torch.get_num_threads())
print("gradient", a.grad.max().item())
print("batches", len(list(DataLoader(range(10), batch_size=2, num_workers=2))))
"""


def test_member_sees_what_a_plain_python_process_would(coordinator, agent, script):
    script("value = 42", "beside.py")
    coordinator.start(script(DESCRIBE), "a", "--b", env={"MINE": "yes"})
    exit_ = coordinator.exit_of()
    assert (exit_.exit_code, exit_.signal, exit_.cause) == (0, None, "done"), coordinator.lines()
    assert coordinator.lines() == [
        "argv ['a', '--b']",
        "name __main__ train.py code",
        "cwd code",
        "stdin ''",
        "session True",
        "main True",
        "beside 42",
        "environ lab/0 yes 127.0.0.1",
        "handlers 0 set()",
    ]


ENDINGS = [
    ("pass", 0),
    ("import sys; sys.exit(3)", 3),
    ("import sys; sys.exit('a word')", 1),
    ("raise ValueError('bad\\nworse')", 1),
    ("def f(): raise KeyError('k')\nf()", 1),
    ("import os; os._exit(9)", 9),
    ("import os; os.kill(os.getpid(), 15)", -15),
    ("import os; os.kill(os.getpid(), 11)", -11),
    ("raise KeyboardInterrupt", -2),
    ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", 0),
    ("import atexit; atexit.register(print, 'at exit'); raise SystemExit(4)", 4),
    ("this is no python", 1),
]


def test_exit_codes_and_output_are_those_of_python(coordinator, agent, script):
    for number, (text, _) in enumerate(ENDINGS):
        coordinator.start(script(text, f"end{number}.py"), member=f"lab/{number}")
    for number, (text, code) in enumerate(ENDINGS):
        exit_ = coordinator.exit_of(f"lab/{number}")
        assert (exit_.exit_code, exit_.signal) == ((code, None) if code >= 0 else (None, -code)), text
        path = script(text, f"end{number}.py")
        plain = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=path.parent)
        assert plain.returncode == code, text
        assert "\n".join(coordinator.lines(f"lab/{number}")) == (plain.stdout + plain.stderr).rstrip("\n"), text


def test_module_runs_as_with_dash_m(coordinator, agent, script):
    path = script("import sys; print(__name__, sys.argv[1:], __spec__.name)", "job.py")
    coordinator.send(
        agent_messages.StartMemberMsg("run", "lab/0", "first", ("job", "x"), str(path.parent), {}, module=True)
    )
    assert coordinator.exit_of().exit_code == 0, coordinator.lines()
    assert coordinator.lines() == ["__main__ ['x'] job"]


def test_exception_of_the_script_is_the_cause(coordinator, agent, script):
    coordinator.start(script("x = 1\nraise ValueError(f'bad {x}')"))
    exit_ = coordinator.exit_of()
    assert (exit_.cause, exit_.detail) == ("user", "ValueError: bad 1")
    assert not any("zygote" in line or "child_main" in line for line in coordinator.lines())


def test_network_error_is_infrastructure(coordinator, agent, script):
    coordinator.start(script("from shoal.errors import PeerUnreachable\nraise PeerUnreachable('silent for 3 s')"))
    exit_ = coordinator.exit_of()
    assert (exit_.cause, exit_.detail) == ("infrastructure", "error[S204] silent for 3 s")


def test_missing_script_ends_as_in_python(coordinator, agent, script):
    path = script("pass")
    path.unlink()
    coordinator.start(path)
    exit_ = coordinator.exit_of()
    assert (exit_.exit_code, exit_.cause) == (2, "user")
    assert "can't open file" in coordinator.lines()[0]


def test_missing_directory_is_named(coordinator, agent, script):
    path = script("pass")
    coordinator.send(
        agent_messages.StartMemberMsg("run", "lab/0", "first", (str(path),), str(path.parent / "nowhere"), {})
    )
    exit_ = coordinator.exit_of()
    assert exit_.exit_code == 1
    assert "nowhere" in exit_.detail


def test_compat_member_starts_in_a_new_interpreter(coordinator, agent, script):
    coordinator.start(script("import sys; print('msgspec' in sys.modules, sys.argv)"), "a", env={"SHOAL_COMPAT": "1"})
    assert coordinator.exit_of().exit_code == 0
    assert coordinator.lines()[0].startswith("False ")
    started = next(m for m in coordinator.received if isinstance(m, agent_messages.MemberStartedMsg))
    assert not started.warm


def test_killed_member_is_infrastructure(coordinator, agent, script):
    coordinator.start(script("import time; print('up'); time.sleep(60)"))
    coordinator.line("up")
    psutil.Process(coordinator.pid_of()).kill()
    exit_ = coordinator.exit_of()
    assert (exit_.signal, exit_.cause) == (9, "infrastructure")
    assert "signal 9" in exit_.detail


def test_forks_do_not_share_random_numbers(coordinator, start_agent, script):
    start_agent(preload="numpy")
    path = script("import numpy, random; print(numpy.random.random(), random.random())")
    coordinator.start(path, member="lab/0")
    coordinator.start(path, member="lab/1")
    coordinator.exit_of("lab/0"), coordinator.exit_of("lab/1")
    (first,), (second,) = coordinator.lines("lab/0"), coordinator.lines("lab/1")
    assert set(first.split()).isdisjoint(second.split())


def test_torch_member_starts_from_a_single_threaded_warm_process(coordinator, start_agent, script):
    agent = start_agent(preload="numpy,torch,torch._dynamo,no_such_module")
    coordinator.start(script(TORCH), env={"OMP_NUM_THREADS": "2"})
    assert coordinator.exit_of().exit_code == 0, coordinator.lines()
    assert coordinator.lines() == ["threads 2", f"gradient {300.0}", "batches 5"]
    assert "could not import no_such_module" in agent.log.read_text()
    assert "forking from it may hang" not in agent.log.read_text()


MULTIPROCESSING = """
import multiprocessing as mp, pickle

class Thing:
    pass

def work(queue):
    queue.put((type(pickle.loads(pickle.dumps(Thing()))).__name__, __name__))

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = mp.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(method, *queue.get(timeout=180))
        process.join()
"""


def test_every_kind_of_multiprocessing_works_in_a_member(coordinator, agent, script):
    coordinator.start(script(MULTIPROCESSING))
    assert coordinator.exit_of().exit_code == 0, coordinator.lines()
    assert coordinator.lines() == ["fork Thing __main__", "spawn Thing __mp_main__", "forkserver Thing __mp_main__"]


def test_ps_shows_the_member_and_its_script(coordinator, agent, script):
    coordinator.start(script("import time; print('up'); time.sleep(60)"), "--fast")
    coordinator.line("up")
    assert " ".join(psutil.Process(coordinator.pid_of()).cmdline()).startswith("shoal lab/0: ")


def test_environment_in_another_encoding_arrives_unchanged(coordinator, start_agent, script):
    start_agent(environ={b"LATIN": b"gr\xfc\xdfe"})
    coordinator.start(script("import os; print(os.environb[b'LATIN'])"))
    assert coordinator.exit_of().exit_code == 0
    assert coordinator.lines() == ["b'gr\\xfc\\xdfe'"]


def test_repeated_request_starts_one_member(coordinator, agent, script):
    path = script("import time; time.sleep(60)")
    coordinator.start(path)
    pid = coordinator.pid_of()
    coordinator.received.clear()
    coordinator.start(path)
    assert coordinator.pid_of() == pid


def test_signal_right_after_the_start_is_not_lost(coordinator, agent, script):
    path = script("import time; time.sleep(60)")
    for number in range(5):
        coordinator.start(path, member=f"lab/{number}")
        coordinator.stop(30.0, member=f"lab/{number}")
    for number in range(5):
        exit_ = coordinator.exit_of(f"lab/{number}")
        assert (exit_.signal, exit_.cause) == (signal.SIGTERM, "asked")


def test_long_lines_are_cut_and_control_characters_replaced(coordinator, agent, script):
    write = "import sys; sys.stdout.buffer.write"
    coordinator.start(script(f"{write}(b'x' * 5000 + b'\\na\\x00\\xff\\x07b\\n1%\\r2%\\r3%\\nno end')"))
    coordinator.exit_of()
    lines = coordinator.lines()
    assert lines == ["x" * 2000 + "… (3000 more)", "a\ufffd\ufffd\ufffdb", "3%", "no end"]
    (log,) = (agent.directory / "logs" / "run").glob("*.log")
    assert log.stat().st_size == 5001 + 6 + 9 + 6


def test_flood_of_lines_is_thinned_but_kept_in_the_file(coordinator, agent, script):
    coordinator.start(script("for i in range(50000): print('line', i)\nprint('end')"))
    coordinator.exit_of()
    assert 0 < len(coordinator.lines()) < 10000
    assert any("in the member's file only" in line for line in coordinator.lines())
    assert coordinator.lines()[-2:] == ["line 49999", "end"]
    (log,) = (agent.directory / "logs" / "run").glob("*.log")
    assert until(lambda: log.read_text().endswith("line 49999\nend\n"), "the whole log")


def test_unreadable_log_costs_only_its_lines(coordinator, agent, script):
    (agent.directory / "logs" / "run" / "lab-0.first.log").mkdir(parents=True)
    coordinator.start(script("print('lost')"))
    assert coordinator.exit_of().exit_code == 1
    coordinator.start(script("print('received')", "again.py"), incarnation="second")
    assert coordinator.exit_of(incarnation="second").exit_code == 0
    assert coordinator.lines() == ["received"]


def test_truncated_log_is_followed_from_its_new_start(coordinator, agent, script, tmp_path):
    text = """
import os, sys, time
print("before " * 100)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("after")
time.sleep(600)
"""
    coordinator.start(script(text), str(tmp_path / "go"))
    coordinator.line("before")
    os.truncate(agent.directory / "logs" / "run" / "lab-0.first.log", 0)
    (tmp_path / "go").touch()
    coordinator.line("after")
