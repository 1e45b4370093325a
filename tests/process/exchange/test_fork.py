from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.process.exchange.meeting import NEVER

from shoal.core.world import Address, Seat, World

pytestmark = pytest.mark.process


def test_a_forked_child_does_not_hide_the_death_of_its_parent(make_ports):
    (port,) = make_ports(1)
    member = subprocess.Popen(
        [sys.executable, "-m", "tests.process.exchange.member", str(port.address.port)],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    child = 0
    try:
        assert member.stdout is not None
        theirs = Address("127.0.0.1", int(member.stdout.readline()))
        world = World(1, (Seat("m0", "first", port.address), Seat("m1", "first", theirs)), 0)
        broken = threading.Event()
        ring = port.connect(world, 20.0, NEVER, lambda *_: broken.set())
        child = int(member.stdout.readline())
        assert not broken.wait(0.2)
        member.send_signal(signal.SIGKILL)
        assert broken.wait(30)
        os.kill(child, 0)
        assert ring.broken is not None
        assert ring.broken.suspects == ("m1",)
    finally:
        member.kill()
        member.wait()
        if child:
            os.kill(child, signal.SIGKILL)
