"""Trainers and servers in one process, one thread each, with real sockets between them and no coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shoal.core.placement import LEDGER, PartAssignment, Placement
from shoal.core.world import Seat
from shoal.settings import RunSettings
from shoal.testing.wait import until
from shoal.wire.credentials import Credentials
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.session.coordinator_client import CoordinatorClient
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.session import MemberExit
from shoal.worker.transport.peers import Peers


class Silent:
    """A line that nobody listens at."""

    down_for_s = 0.0

    def send(self, message: Any) -> None:
        """Nobody hears it."""

    def close(self) -> None:
        """Nothing is open."""


class Placed(ServedSession):
    """A session whose placement is given to it by hand."""

    def __init__(self, name: str, role: str, settings: RunSettings, where: str) -> None:
        told = MemberEnvironment("http://127.0.0.1:9", "", "town", name, "1", "127.0.0.1", {}, settings, where, role)
        CoordinatorClient.__init__(self, told, Credentials("token"))
        self._uplink = Silent()
        self.is_server = role == "server"
        self.placement = None
        self.on_placement = self.on_trainer_lost = lambda *_told: None
        self.unconfirmed = list
        self._restore_requested, self._failure = False, None
        self.peers = Peers(b"token", "town", name, "1", "127.0.0.1")
        self.address = self.peers.address
        self.writes = name == "trainer-0"

    @property
    def is_writer(self) -> bool:
        return self.writes

    def claim(self, name: str) -> bool:
        return True

    @property
    def is_waiting(self) -> bool:
        return self._ready

    def place(self, placement: Placement) -> None:
        with self._changed:
            self.placement = placement
            self.on_placement(placement)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()


def town(
    trainers: int, servers: int, body: Callable[[Placed], Any], where: str = "", sync: str = "stale:1", **settings: Any
) -> list[Any]:
    """Let every member do `body`, which ends for servers when all trainers are done; what trainers return."""
    values = RunSettings(sync=sync, servers=servers, checkpoint_every_s=0, **settings)
    served = [Placed(f"server-{number}", "server", values, where) for number in range(servers)]
    trained = [Placed(f"trainer-{number}", "trainer", values, where) for number in range(trainers)]
    results: dict[str, Any] = {}
    failures: list[BaseException] = []

    def work(session: Placed) -> None:
        try:
            results[session.me] = body(session)
        except MemberExit as over:
            if not session.is_server:
                failures.append(over)
        except BaseException as error:  # noqa: BLE001 - it is raised again, in the thread that asked
            failures.append(error)

    threads = {one.me: threading.Thread(target=work, args=(one,), daemon=True) for one in (*served, *trained)}
    for thread in threads.values():
        thread.start()
    try:
        until(lambda: failures or all(one.is_waiting for one in (*served, *trained)), "all members to be ready")
        placement = _placement(served)
        for one in (*served, *trained):
            one.place(placement)
        until(
            lambda: failures or not any(threads[one.me].is_alive() for one in trained), "the trainers to finish", 180.0
        )
    finally:
        for one in (*served, *trained):
            one.end()
        for thread in threads.values():
            thread.join(5)
        for one in (*served, *trained):
            one.close()
    if failures:
        raise failures[0]
    return [results[one.me] for one in trained]


def _placement(servers: list[Placed]) -> Placement:
    seats = tuple(Seat(one.me, "1", one.address) for one in servers)
    shards = tuple(PartAssignment(one.me) for one in servers)
    assert LEDGER == 0
    return Placement(1, 1, seats, (PartAssignment(servers[0].me), *shards), fresh=True)
