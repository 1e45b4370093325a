"""SIGTERM to a member: from its agent, and from a system that ends a whole job."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shoal.testing.wait import until

pytestmark = pytest.mark.process

MEMBER = """
import sys, time
from shoal.worker import join as worker_join

worker_join.REPEATED_NOTICE_S = float(sys.argv[1])

class Told:
    def leave(self, within_s, why):
        print("leaves", why, flush=True)

worker_join._handle_sigterm(Told())
print("ready", flush=True)
time.sleep(60)
print("went on", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def member(repeated_notice_s: float) -> Iterator[subprocess.Popen[str]]:
    """Start a member for which a SIGTERM is the same notice for so long."""
    argv = [sys.executable, "-c", MEMBER, str(repeated_notice_s)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "leaves SIGTERM\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_repeated_sigterm_is_the_same_notice() -> None:
    with member(repeated_notice_s=60.0) as process:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)


def test_later_sigterm_ends_the_process_at_once() -> None:
    with member(repeated_notice_s=0.1) as process:

        def ended() -> bool:
            process.send_signal(signal.SIGTERM)
            return process.poll() is not None

        until(ended, "a later SIGTERM ends the member", poll_s=0.2)
        assert process.returncode == -signal.SIGTERM
        assert process.stdout is not None
        assert process.stdout.read() == ""
