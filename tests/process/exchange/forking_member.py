"""Member in a process of its own: joins a ring of two, forks a child that only sleeps, and sleeps."""

from __future__ import annotations

import os
import sys
import threading
import time

from tests.process.exchange.loopback import TOKEN

from shoal.core.world import Address, Seat, World
from shoal.worker.collectives.connect_ring import connect_ring
from shoal.worker.transport.peers import Peers

peer = Peers(TOKEN, "run", "m1", "first", "127.0.0.1")
other = Seat("m0", "first", Address("127.0.0.1", int(sys.argv[1])))
print(peer.address.port, flush=True)
world = World(1, (other, Seat("m1", "first", peer.address)), 0)
ring = connect_ring(peer, world, 20.0, threading.Event())
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
