"""The supervisor: carries out a launch plan, keeps its processes alive, and shuts them down.

It is used in three places: by `shoal run` in the foreground, by the process of a detached run, and by a thread of a
Python program that called `shoal.run`. Each of them calls `open` once, `restart_dead_services` again and again while it
follows the run, and `close` at the end, with a client if the run has ended and without one if it is abandoned.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from shoal.core.nouns import counted
from shoal.errors import CoordinatorUnreachable, ServiceFailed, ShoalError
from shoal.launch import project_upload
from shoal.launch.api_client import ApiClient, open_client
from shoal.launch.child_service import ChildService
from shoal.launch.download import LocalRunFolder, download
from shoal.launch.launch_plan import URL_PLACEHOLDER, LaunchPlan, create_directory, remove_directory
from shoal.launch.run_lookup import ENDED, SUPERVISOR_FILE, read_text
from shoal.wire import pool_files
from shoal.wire.api import RunView, ScaleRequest

# Exists only beside a coordinator that was started for a run; a standing coordinator logs to its terminal.
COORDINATOR_LOG = "coordinator.log"
READY_TIMEOUT_S = 60.0
GRACE_S = 8.0
# Releasing machines may take longer; the coordinator then says how long.
RELEASE_GRACE_S = 60.0
POLL_S = 0.2
NOTE_EVERY_S = 10.0


class Supervisor:
    """Owner of the coordinator process and the agent process of one launch."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._directory = Path(plan.directory)
        self._coordinator = ChildService("coordinator", plan.coordinator, self._directory / COORDINATOR_LOG)
        self._agent: ChildService | None = None
        self._view: RunView | None = None

    def open(self) -> tuple[ApiClient, RunView]:
        """Start both processes and submit or resume the run.

        On failure both are stopped and a new directory is removed, unless the error names a log in it.
        """
        if self._plan.creates_directory:
            create_directory(self._directory)
        if self._plan.pools is not None:
            pool_files.write_pools(self._directory, self._plan.pools)
        (self._directory / SUPERVISOR_FILE).write_text(f"{os.getpid()}\n")
        try:
            client = self._start()
            self._view = submit_or_resume(client, self._plan)
            return client, self._view
        except BaseException as error:
            self.close()
            if self._plan.creates_directory and not isinstance(error, ServiceFailed):
                remove_directory(self._directory)
            raise

    def restart_dead_services(self) -> list[str]:
        """Restart each process that has died; return one sentence for each."""
        notes = []
        for service in (self._coordinator, self._agent):
            ended = service.restart_if_dead() if service is not None else ""
            if service is not None and ended:
                notes.append(f"the {service.name} died ({ended}) and was restarted")
        return notes

    def close(self, client: ApiClient | None = None, note: Callable[[str], None] = lambda _text: None) -> None:
        """Stop both processes: with `client` by request first, then by closing their lifelines, at last by SIGKILL.

        The coordinator is not killed while it still releases machines; `note` receives what that is waiting for.
        """
        (self._directory / SUPERVISOR_FILE).unlink(missing_ok=True)
        if client is not None and self._coordinator.running():
            with contextlib.suppress(ShoalError):
                client.shutdown()
        if client is not None and self._agent is not None:
            self._agent.wait(GRACE_S)
        if self._agent is not None:
            self._agent.stop(GRACE_S)
        if client is not None:
            self._wait_for_release(note)
            client.close()
        self._coordinator.close_lifeline()
        self._wait_for_release(note)
        self._coordinator.stop(0.0)

    def _wait_for_release(self, note: Callable[[str], None]) -> None:
        """Block until the coordinator has exited, or for as long as it says that releasing its machines may take."""
        until = time.monotonic() + (RELEASE_GRACE_S if self._plan.pools is not None else GRACE_S)
        noted_at, known = -NOTE_EVERY_S, None
        while not self._coordinator.wait(POLL_S) and time.monotonic() < until:
            release = pool_files.read_release_progress(self._directory)
            if release is not None and release != known:
                # Another process wrote a time of the wall clock, which may jump: what remains is read off once.
                known, now, remaining_s = release, time.monotonic(), max(0.0, release.until - time.time())
                until = max(until, now + remaining_s + GRACE_S)
                if release.remaining and now - noted_at > NOTE_EVERY_S:
                    noted_at = now
                    machines = counted(release.remaining, "machine")
                    with contextlib.suppress(OSError):  # the terminal may be gone
                        note(f"releasing {machines}; this may take {remaining_s:.0f} s")

    def download_outputs(self) -> tuple[str, ...]:
        """Copy the files that remote members saved to where local members would have saved them; return their names."""
        if self._view is None or not Path(self._view.cwd).is_dir():
            return ()
        return download(LocalRunFolder(self._directory, self._view.run), Path(self._view.cwd)).names

    def _start(self) -> ApiClient:
        url_file = self._directory / "url"
        url_file.unlink(missing_ok=True)
        self._coordinator.start()
        client = wait_until_ready(self._coordinator, self._directory)
        # A restarted coordinator must listen where members and agents look for it.
        port = str(urlsplit(client.url).port)
        index = self._plan.coordinator.index("--port") + 1
        self._coordinator.argv = (*self._plan.coordinator[:index], port, *self._plan.coordinator[index + 1 :])
        if self._plan.agent:
            argv = tuple(client.url if part == URL_PLACEHOLDER else part for part in self._plan.agent)
            self._agent = ChildService("agent", argv, self._directory / "agent.log")
            self._agent.start()
        return client


def wait_until_ready(coordinator: ChildService, directory: Path) -> ApiClient:
    """Block until a coordinator that was just started answers; return a client for it."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if not coordinator.running():
            raise coordinator.failure(f"the coordinator did not start ({coordinator.exit_description()})")
        url = read_text(directory / "url")
        if url:
            client = open_client(url, str(directory / "token"))
            with contextlib.suppress(CoordinatorUnreachable):
                client.check()
                return client
        time.sleep(0.02)
    raise coordinator.failure(f"the coordinator was not ready within {READY_TIMEOUT_S:g} s")


def submit_or_resume(client: ApiClient, plan: LaunchPlan) -> RunView:
    """Upload the plan's project, if any, and submit its run; or resume the run that the plan names."""
    if plan.spec is None:
        return _resume(client, plan.resume, plan.members, plan.budget)
    digest = ""
    if plan.ship or plan.packed:
        root = Path(plan.ship) if plan.ship else None
        packed = {name: Path(path) for name, path in plan.packed.items()}
        digest = project_upload.upload_project(client, root, packed, plan.token_file)
    return client.submit(replace(plan.spec, project=digest))


def _resume(client: ApiClient, run: str, members: tuple[int, int] | None, budget: float | None) -> RunView:
    """Resume a run; one whose coordinator died before the run ended continues without a request."""
    view = client.run(run)
    bounds = members or (view.members_min, view.members_max)
    request = ScaleRequest(*bounds, budget) if members is not None or budget is not None else None
    if view.status in ENDED:
        return client.resume(run, request)
    return view if request is None else client.scale(run, request)


def port_if_free(url: str) -> int:
    """Return the port of an ended coordinator's URL if it is free, else 0 for any port."""
    port = urlsplit(url).port if url else None
    if port is None:
        return 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port
