"""Keeps the coordinator and the agent of a run alive while the process that started it lives."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time

from shoal.errors import CoordinatorUnreachable, ShoalError
from shoal.launch.api_client import ApiClient
from shoal.launch.run_lookup import OVER
from shoal.launch.supervisor import Supervisor
from shoal.wire.api import StopRequest

EVERY_S = 0.5
END_WITHIN_S = 40.0


class SupervisorThread(threading.Thread):
    """Tends the services of one run until it is over; what the process leaves undone is stopped, with a checkpoint."""

    def __init__(self, supervisor: Supervisor, client: ApiClient, run: str) -> None:
        super().__init__(name=f"shoal-{run}", daemon=True)
        self._supervisor, self._client, self._run = supervisor, client, run
        self._given_up = threading.Event()
        self.failure: ShoalError | None = None

    def start(self) -> None:
        super().start()
        atexit.register(self.end)

    def run(self) -> None:
        try:
            while not self._is_over() and not self._given_up.wait(EVERY_S):
                self._supervisor.tend()
        except ShoalError as error:
            self.failure = error
        finally:
            self._supervisor.close(None if self._given_up.is_set() or self.failure else self._client, _say)
            atexit.unregister(self.end)

    def end(self) -> None:
        """Stop the run if it goes on, and end its services."""
        deadline = time.monotonic() + END_WITHIN_S
        with contextlib.suppress(ShoalError):
            if self.is_alive():
                asking = ApiClient(self._client.url, self._client.token)
                asking.stop(self._run, StopRequest("the Python process that started it ends"))
        self.join(max(0.0, deadline - time.monotonic()))
        self._given_up.set()
        self.join()

    def _is_over(self) -> bool:
        try:
            return self._client.run(self._run).status in OVER
        except CoordinatorUnreachable:
            return False


def _say(text: str) -> None:
    sys.stderr.write(f"shoal: {text}\n")
