"""Starts what was rendered, keeps it alive, and takes it down again."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from shoal.errors import CoordinatorUnreachable, ShoalError
from shoal.launch import download, project_upload
from shoal.launch.api_client import ApiClient, open_client
from shoal.launch.child_service import ChildService
from shoal.launch.launch_plan import URL, LaunchPlan, make, unmake
from shoal.launch.run_lookup import OVER, SUPERVISOR, read_text
from shoal.wire import pool_files
from shoal.wire.api import RunView, ScaleRequest

# Only coordinators that somebody started for a run have one: those that stand alone speak to their terminal.
COORDINATOR_LOG = "coordinator.log"
READY_S = 60.0
GRACE_S = 8.0
# What was hired has to be given back first; how long that may take, the coordinator says.
HIRES_GRACE_S = 60.0
LOOK_S = 0.2
SAY_S = 10.0


class Supervisor:
    """Owns the coordinator and the agent of one launch."""

    def __init__(self, launch: LaunchPlan) -> None:
        self._launch = launch
        self._directory = Path(launch.directory)
        self._coordinator = ChildService("coordinator", launch.coordinator, self._directory / COORDINATOR_LOG)
        self._agent: ChildService | None = None
        self._view: RunView | None = None

    def open(self) -> tuple[ApiClient, RunView]:
        """Start both, submit or resume the run; on failure nothing is left behind."""
        if self._launch.made:
            make(self._directory)
        if self._launch.hires is not None:
            pool_files.write(self._directory, self._launch.hires)
        (self._directory / SUPERVISOR).write_text(f"{os.getpid()}\n")
        try:
            client = self._start()
            self._view = hand_over(client, self._launch)
            return client, self._view
        except BaseException:
            self.close()
            raise

    def tend(self) -> list[str]:
        """Start again what has died; one sentence for each."""
        said = []
        for service in (self._coordinator, self._agent):
            how = service.revive() if service is not None else ""
            if service is not None and how:
                said.append(f"the {service.name} died ({how}) and was started again")
        return said

    def close(self, client: ApiClient | None = None, say: Callable[[str], None] = lambda _text: None) -> None:
        """End both: by asking first, then surely, but not before what was hired is given back; `say` hears of it."""
        (self._directory / SUPERVISOR).unlink(missing_ok=True)
        if client is not None and self._coordinator.running():
            with contextlib.suppress(ShoalError):
                client.shutdown()
        if client is not None and self._agent is not None:
            self._agent.wait(GRACE_S)
        if self._agent is not None:
            self._agent.end(GRACE_S)
        if client is not None:
            self._wait_for_hires(say)
            client.close()
        self._coordinator.cut()
        self._wait_for_hires(say)
        self._coordinator.end(0.0)
        if self._launch.made and self._view is None:
            unmake(self._directory)

    def _wait_for_hires(self, say: Callable[[str], None]) -> None:
        """Until the coordinator has ended, for as long as it says that giving back what it hired may take."""
        until = time.time() + (HIRES_GRACE_S if self._launch.hires is not None else GRACE_S)
        said_at = 0.0
        while not self._coordinator.wait(LOOK_S) and time.time() < until:
            leaving = pool_files.leaving_of(self._directory)
            if leaving is not None:
                until = max(until, leaving.until + GRACE_S)
                if leaving.left and time.time() - said_at > SAY_S:
                    said_at = time.time()
                    machines = "1 machine" if leaving.left == 1 else f"{leaving.left} machines"
                    with contextlib.suppress(OSError):  # the terminal may be gone
                        say(f"giving back {machines}, which may take {leaving.until - said_at:.0f} s")

    def bring_back(self) -> tuple[str, ...]:
        """Bring what members elsewhere saved to where those here would have; the names."""
        if self._view is None or not Path(self._view.cwd).is_dir():
            return ()
        return download.bring(download.LocalRunFolder(self._directory, self._view.run), Path(self._view.cwd)).names

    def _start(self) -> ApiClient:
        url_file = self._directory / "url"
        url_file.unlink(missing_ok=True)
        self._coordinator.start()
        client = wait_for(self._coordinator, self._directory)
        # From now on it must come back where members and agents look for it.
        port = str(urlsplit(client.url).port)
        at = self._launch.coordinator.index("--port") + 1
        self._coordinator.argv = (*self._launch.coordinator[:at], port, *self._launch.coordinator[at + 1 :])
        if self._launch.agent:
            agent = tuple(client.url if part == URL else part for part in self._launch.agent)
            self._agent = ChildService("agent", agent, self._directory / "agent.log")
            self._agent.start()
        return client


def wait_for(coordinator: ChildService, directory: Path) -> ApiClient:
    """A client of the coordinator that was just started there, as soon as it answers."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if not coordinator.running():
            raise coordinator.failure(f"the coordinator did not start ({coordinator.died()})")
        url = read_text(directory / "url")
        if url:
            client = open_client(url, str(directory / "token"))
            with contextlib.suppress(CoordinatorUnreachable):
                client.check()
                return client
        time.sleep(0.02)
    raise coordinator.failure(f"the coordinator was not ready within {READY_S:g} s")


def hand_over(client: ApiClient, launch: LaunchPlan) -> RunView:
    """Submit the run of a launch with what is sent along, or resume it."""
    if launch.spec is None:
        return resume(client, launch.resume, launch.members, launch.budget)
    root, packed = Path(launch.ship) if launch.ship else None, launch.packed
    if root or packed:
        along = {name: Path(one) for name, one in packed.items()}
        sent = project_upload.send(client, root, along, launch.token_file)
    else:
        sent = ""
    return client.submit(replace(launch.spec, project=sent))


def resume(client: ApiClient, run: str, members: tuple[int, int] | None, budget: float | None = None) -> RunView:
    """Set a run going again; one that its coordinator never saw end goes on by itself."""
    view = client.run(run)
    bounds = members or (view.members_min, view.members_max)
    ask = ScaleRequest(*bounds, budget) if members is not None or budget is not None else None
    if view.status in OVER:
        return client.resume(run, ask)
    return view if ask is None else client.scale(run, ask)


def port_if_free(url: str) -> int:
    """The port of a coordinator that has ended if nobody else has it now, else 0 for any."""
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
