"""Trainers and servers in one process, one thread each, with real sockets and no coordinator."""

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


class SilentUplink:
    """Uplink to a coordinator that does not exist."""

    down_for_s = 0.0

    def send(self, message: Any) -> None:
        """Drop the message."""

    def close(self) -> None:
        """Do nothing: no connection is open."""


class ThreadSession(ServedSession):
    """Session whose placement is set by the test."""

    def __init__(self, name: str, role: str, settings: RunSettings, directory: str) -> None:
        environment = MemberEnvironment(
            "http://127.0.0.1:9", "", "threads", name, "1", "127.0.0.1", {}, settings, directory, role
        )
        CoordinatorClient.__init__(self, environment, Credentials("token"))
        self._uplink = SilentUplink()
        self.is_server = role == "server"
        self.placement = None
        self.on_placement = self.on_trainer_lost = lambda *_arguments: None
        self.unconfirmed = list
        self._restore_requested, self._failure = False, None
        self.peers = Peers(b"token", "threads", name, "1", "127.0.0.1")
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


def run_threads(
    trainers: int,
    servers: int,
    body: Callable[[ThreadSession], Any],
    directory: str = "",
    sync: str = "stale:1",
    **settings: Any,
) -> list[Any]:
    """Run `body` on every member, and return the results of the trainers; servers are ended after them."""
    values = RunSettings(sync=sync, servers=servers, checkpoint_every_s=0, **settings)
    server_sessions = [ThreadSession(f"server-{number}", "server", values, directory) for number in range(servers)]
    trainer_sessions = [ThreadSession(f"trainer-{number}", "trainer", values, directory) for number in range(trainers)]
    results: dict[str, Any] = {}
    failures: list[BaseException] = []

    def work(session: ThreadSession) -> None:
        try:
            results[session.me] = body(session)
        except MemberExit as ended:
            if not session.is_server:
                failures.append(ended)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            failures.append(error)

    sessions = (*server_sessions, *trainer_sessions)
    threads = {session.me: threading.Thread(target=work, args=(session,), daemon=True) for session in sessions}
    for thread in threads.values():
        thread.start()
    try:
        until(lambda: failures or all(session.is_waiting for session in sessions), "all members to be ready")
        placement = _placement(server_sessions)
        for session in sessions:
            session.place(placement)
        until(
            lambda: failures or not any(threads[session.me].is_alive() for session in trainer_sessions),
            "the trainers to finish",
            180.0,
        )
    finally:
        for session in sessions:
            session.end()
        for thread in threads.values():
            thread.join(30)
        for session in sessions:
            session.close()
    if failures:
        raise failures[0]
    return [results[session.me] for session in trainer_sessions]


def _placement(servers: list[ThreadSession]) -> Placement:
    seats = tuple(Seat(server.me, "1", server.address) for server in servers)
    shards = tuple(PartAssignment(server.me) for server in servers)
    assert LEDGER == 0
    return Placement(1, 1, seats, (PartAssignment(servers[0].me), *shards), fresh=True)
