"""The supervisor of an attached run: a thread of the process that called `shoal.run`."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time

from shoal.errors import CoordinatorUnreachable, ShoalError
from shoal.launch.api_client import ApiClient
from shoal.launch.run_lookup import ENDED
from shoal.launch.supervisor import Supervisor
from shoal.wire.api import StopRequest

POLL_S = 0.5
STOP_TIMEOUT_S = 40.0


class SupervisorThread(threading.Thread):
    """Restarts the services of one run until it has ended; when the process exits, stops the run with a checkpoint."""

    def __init__(self, supervisor: Supervisor, client: ApiClient, run: str) -> None:
        super().__init__(name=f"shoal-{run}", daemon=True)
        self._supervisor, self._client, self._run = supervisor, client, run
        self._abandoned = threading.Event()
        self.failure: ShoalError | None = None

    def start(self) -> None:
        super().start()
        atexit.register(self.stop)

    def run(self) -> None:
        try:
            while not self._has_ended() and not self._abandoned.wait(POLL_S):
                self._supervisor.restart_dead_services()
        except ShoalError as error:
            self.failure = error
        finally:
            self._supervisor.close(None if self._abandoned.is_set() or self.failure else self._client, _note)
            atexit.unregister(self.stop)

    def stop(self) -> None:
        """Stop the run if it is active, and then its services, within STOP_TIMEOUT_S and their grace periods."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        with contextlib.suppress(ShoalError):
            if self.is_alive():
                self._client.another().stop(self._run, StopRequest("the Python process that started the run exited"))
        self.join(max(0.0, deadline - time.monotonic()))
        self._abandoned.set()
        self.join()

    def _has_ended(self) -> bool:
        try:
            return self._client.run(self._run).status in ENDED
        except CoordinatorUnreachable:
            return False


def _note(text: str) -> None:
    sys.stderr.write(f"shoal: {text}\n")
