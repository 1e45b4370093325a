from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.process.exchange.loopback import NEVER

from shoal.core.world import Address, Seat, World
from shoal.worker.collectives.connect_ring import connect_ring

pytestmark = pytest.mark.process


def test_forked_child_does_not_hide_the_death_of_its_parent(make_peers):
    (peer,) = make_peers(1)
    member = subprocess.Popen(
        [sys.executable, "-m", "tests.process.exchange.forking_member", str(peer.address.port)],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    child = 0
    try:
        assert member.stdout is not None
        theirs = Address("127.0.0.1", int(member.stdout.readline()))
        world = World(1, (Seat("m0", "first", peer.address), Seat("m1", "first", theirs)), 0)
        broken = threading.Event()
        ring = connect_ring(peer, world, 20.0, NEVER, lambda *_: broken.set())
        child = int(member.stdout.readline())
        assert not broken.wait(0.2)
        member.send_signal(signal.SIGKILL)
        assert broken.wait(120)
        os.kill(child, 0)
        assert ring.broken is not None
        assert ring.broken.suspects == ("m1",)
    finally:
        member.kill()
        member.wait()
        if child:
            os.kill(child, signal.SIGKILL)
