"""SIGTERM to a member: from its agent, and from a system that ends a whole job."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.process

MEMBER = """
import time
from shoal.worker import join as worker_join

class Told:
    def leave(self, within_s, why):
        print("leaves", why, flush=True)

worker_join._handle_sigterm(Told())
print("ready", flush=True)
time.sleep(60)
print("went on", flush=True)
time.sleep(60)
"""


@pytest.fixture
def member():
    process = subprocess.Popen([sys.executable, "-c", MEMBER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_second_sigterm_within_two_seconds_is_the_same_notice(member):
    member.send_signal(signal.SIGTERM)
    assert member.stdout.readline() == "leaves SIGTERM\n"
    member.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        member.wait(0.5)


def test_later_sigterm_ends_the_process_at_once(member):
    member.send_signal(signal.SIGTERM)
    assert member.stdout.readline() == "leaves SIGTERM\n"
    time.sleep(2.5)
    deadline = time.monotonic() + 30
    while member.poll() is None and time.monotonic() < deadline:
        member.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert member.returncode == -signal.SIGTERM
    assert member.stdout.read() == ""
