"""Engine for ssh: an agent is a process in a session of its own on a host, found again by a directory that names it.

Every call to a host is one run of the system's ssh, with the user's own configuration and keys, over a connection that
calls to the host share (`host_connection`). The host runs a small helper that is sent along (`remote_helper`), so
nothing has to be installed there for the engine itself.

Which host. A pool lists hosts with the number of allocations that each takes. An allocation tries them in an order
that follows from its name, so that every attempt to submit it begins with the same host; a host that is full, unfit
or known to be unreachable is skipped, and the reasons are collected for the error.

Once, on one host. The hosts themselves are the record of what runs where: `submit` first lists them all. Within a host
the helper's lock makes a start idempotent. Between hosts the danger is a connection that breaks during a start: the
agent may or may not run there. Such a start is *unconfirmed*, and the allocation goes to no other host until

- the host answers again and says whether it has it, or
- the host is silent for `lost_after_s` and counts as lost,

but in no case before `START_WITHIN_S` has passed: the helper refuses a start that arrives later than that, so nothing
that is still on its way can start a second agent.

Unreachable hosts. A host that does not answer is called again in the background, with growing pauses, so that it does
not delay the others. Until `lost_after_s` has passed, `watch` reports what was last seen there, because a network
failure must not look like the end of its agents; then they count as gone. `watch` raises only if no host answers.

Clocks. A start carries a deadline in the host's own time. So every reply includes the host's clock, its offset is
estimated from the middle of the call, and an offset above two seconds is reported to the user.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec

from shoal.core.nouns import counted
from shoal.engines import exit_message, grace_period
from shoal.engines.agent_script import KEEP_S
from shoal.engines.engine import AllocationRequest, AllocationStatus, Capacity, Engine, EngineOptions, RenderedRequest
from shoal.engines.ssh import command, host_connection
from shoal.engines.ssh.command import SshOptions
from shoal.engines.ssh.errors import HostError
from shoal.engines.ssh.host_connection import ENV, HostConnection, Json
from shoal.errors import AllocationRefused, EngineUnreachable, LaunchError, PoolFull

if TYPE_CHECKING:
    from shoal.engines.ssh.remote_helper import RemoteAllocation

FRESH_S = 2.0
START_WITHIN_S = 20.0
START_S = 15.0
CHECK_S = 75.0
CANCEL_MARGIN_S = 20.0
LOW_DISK_BYTES = 1 << 30
STALE_CONTROL_S = 3600.0
CLEAN_UP_S = 60.0
# No allocation has this tag: all that run on a host are those of others.
NO_TAG = "-"


@dataclass(frozen=True, slots=True)
class _UnconfirmedStart:
    """Host that may have started an allocation; after `until`, in monotonic seconds, it will not start it any more."""

    host: str
    until: float


class Ssh(Engine):
    """Agents on hosts that ssh reaches."""

    options_type: ClassVar[type[EngineOptions]] = SshOptions

    def __init__(self, pool: str, options: SshOptions, control: str = "") -> None:
        config = os.path.expanduser(options.config)
        super().__init__(pool, msgspec.structs.replace(options, config=config))
        self._hosts = command.hosts(pool, options)
        # Random, so that no other user can put something there; short, because paths of sockets have to be.
        self._control = control or f"/tmp/shoal-ssh-{secrets.token_hex(6)}"
        background = _BackgroundTasks(options.parallel)
        self._connections = {
            host.host: HostConnection(pool, host, self._ssh, self._control, background) for host in self._hosts
        }
        self._unconfirmed: dict[tuple[str, str], _UnconfirmedStart] = {}
        self._submit_locks: dict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
        called = {*self._connections, *filter(None, [options.jump])}
        self._disconnect = weakref.finalize(self, _disconnect, self._ssh, called, self._control)

    @property
    def _ssh(self) -> SshOptions:
        assert isinstance(self.options, SshOptions)
        return self.options

    @property
    def max_allocations(self) -> int:
        return sum(host.room for host in self._hosts)

    def render(self, request: AllocationRequest) -> RenderedRequest:
        return self._rendered(request, command.order(self._hosts, request.allocation)[0].host)

    def _rendered(self, request: AllocationRequest, host: str) -> RenderedRequest:
        return RenderedRequest(command.argv(self._ssh, host, self._control), command.script(request, self._ssh), ENV)

    def close(self) -> None:
        self._disconnect()

    # --- submit

    def submit(self, request: AllocationRequest) -> str:
        with self._submit_locks[request.tag, request.allocation]:
            self._confirm_start(request)
            self._list_all(request.tag, within_s=FRESH_S)
            if not any(_room(connection, request.tag) for connection in self._connections.values()):
                self._list_all(request.tag)
            host = self._host_of(request.tag, request.allocation) or self._start_on_some_host(request)
            return command.handle(host, request.tag, request.allocation)

    def _host_of(self, tag: str, allocation: str) -> str | None:
        """Return the host that runs an allocation, as far as is known."""
        for connection in self._connections.values():
            if any(remote["allocation"] == allocation and remote["alive"] for remote in connection.allocations(tag)):
                return connection.host
        return None

    def _start_on_some_host(self, request: AllocationRequest) -> str:
        """Start an allocation on the first host that takes it; return the host."""
        rejections: list[tuple[str, LaunchError | str]] = []
        for host in command.order(self._hosts, request.allocation):
            connection = self._connections[host.host]
            if connection.error is not None:
                rejections.append((host.host, connection.error.error))
                continue
            try:
                full = self._start(request, connection)
            except HostError as failure:
                if failure.unsure:
                    until = time.monotonic() + START_WITHIN_S
                    self._unconfirmed[request.tag, request.allocation] = _UnconfirmedStart(host.host, until)
                    raise failure.error from None
                rejections.append((host.host, failure.error))
                continue
            if not full:
                return host.host
            rejections.append((host.host, full))
        raise self._no_host(request, rejections)

    def _start(self, request: AllocationRequest, connection: HostConnection) -> str:
        """Start an allocation on a host; return why it is full, or "" if it has started."""
        if not _room(connection, request.tag):
            return _full(connection.room, connection)
        self._check(connection)
        call = {
            "do": "start",
            "tag": request.tag,
            "allocation": request.allocation,
            "room": connection.room,
            "script": self._rendered(request, connection.host).text,
            "credentials": f"{request.credentials.token}\n{request.credentials.certificate_pem or ''}",
            "grace_s": grace_period.of(request),
            # A call that a restored connection delivers late must not start what was given up meanwhile.
            "start_by": time.time() + connection.ahead_s + START_WITHIN_S,
        }
        reply = connection.call(call, START_S)
        if reply["state"] == "full":
            return _full(reply["running"], connection)
        if reply["state"] == "late":
            what = f"{connection.host} was too slow to start {request.allocation}"
            raise HostError(EngineUnreachable(what, where=connection.host))
        connection.add_allocation(request.tag, request.allocation)
        return ""

    def _check(self, connection: HostConnection) -> None:
        """Check once that an agent could run on a host; raise `HostError`."""
        if not connection.checked:
            try:
                connection.call({"do": "check", "check": command.check(self._ssh)}, CHECK_S)
            except HostError as failure:
                raise HostError(failure.error) from failure
            connection.checked = True

    def _confirm_start(self, request: AllocationRequest) -> None:
        """Find out whether a host started an allocation when its connection broke; raise as long as that is unknown."""
        unconfirmed = self._unconfirmed.get((request.tag, request.allocation))
        if unconfirmed is None:
            return
        connection = self._connections[unconfirmed.host]
        answered = connection.list(request.tag) is not None
        if self._host_of(request.tag, request.allocation) is None and time.monotonic() < unconfirmed.until:
            raise self._start_unconfirmed(request, connection, "the host may still start it for some seconds")
        if not answered and connection.last_reply(request.tag) is not None:
            raise self._start_unconfirmed(request, connection, connection.why())
        del self._unconfirmed[request.tag, request.allocation]

    def _start_unconfirmed(self, request: AllocationRequest, connection: HostConnection, why: str) -> EngineUnreachable:
        what = f"{connection.host} may have started {request.allocation} when the connection broke"
        where = f"pool {self.pool}, ssh {connection.host}"
        return EngineUnreachable(what, where=where, why=why, do="wait: it is resolved when the host answers")

    def _no_host(self, request: AllocationRequest, rejections: list[tuple[str, LaunchError | str]]) -> LaunchError:
        """Return the error of an allocation that no host took; it can be retried if all hosts were unreachable."""
        errors = [error for _, error in rejections if isinstance(error, LaunchError)]
        if len(rejections) == len(errors) == 1:
            return errors[0]
        whys = [
            f"{host}: {error if isinstance(error, str) else f'{error.what} ({error.why})'}"
            for host, error in rejections
        ]
        silent = [error for error in errors if isinstance(error, EngineUnreachable)]
        kind: type[LaunchError] = EngineUnreachable if len(silent) == len(rejections) else AllocationRefused
        if len(errors) < len(rejections):
            kind = PoolFull
        remedies = dict.fromkeys(error.do for error in errors if error.do)
        return kind(
            f"no host of pool {self.pool} takes {request.allocation}",
            where=f"pool {self.pool}",
            why="; ".join(whys),
            do="; ".join(remedies) or f"add hosts to [pool.{self.pool}], or raise per_host",
        )

    # --- watch, cancel, clean_up, capacity

    def watch(self, tag: str) -> list[AllocationStatus]:
        replies = self._list_all(tag)
        if not any(replies.values()):
            raise self._unreachable()
        statuses: dict[object, AllocationStatus] = {}
        for host, reply in replies.items():
            connection = self._connections[host]
            for remote in reply["allocations"] if reply is not None else connection.allocations(tag):
                status = self._status(connection, tag, remote, silent=reply is None)
                # Two names of one host list the same process twice.
                statuses.setdefault((remote["allocation"], tuple(remote["process"] or ()) or host), status)
        running = {status.allocation for status in statuses.values() if status.state == "running"}
        return [status for status in statuses.values() if status.state == "running" or status.allocation not in running]

    def _unreachable(self) -> LaunchError:
        """Return the error of a pool none of whose hosts answers; final if each of them rejects us."""
        connections = self._connections.values()
        errors = [connection.error.error for connection in connections if connection.error is not None]
        refusals = [error for error in errors if isinstance(error, AllocationRefused)]
        if len(refusals) == len(connections) == 1:
            return refusals[0]
        kind: type[LaunchError] = AllocationRefused if len(refusals) == len(connections) else EngineUnreachable
        return kind(
            f"no host of pool {self.pool} answers",
            where=f"pool {self.pool}",
            why="; ".join(connection.why() for connection in connections),
            do="; ".join(dict.fromkeys(error.do for error in errors)),
        )

    def _status(
        self, connection: HostConnection, tag: str, remote: RemoteAllocation, *, silent: bool
    ) -> AllocationStatus:
        name = remote["allocation"]
        handle = command.handle(connection.host, tag, name)
        if not remote["alive"]:
            message = exit_message.of_log(remote["log"], command.agent_python(self._ssh))
            connection.checked = False
            why = f"{message}; {connection.skew}" if connection.skew else message
            return AllocationStatus(name, handle, "gone", why)
        return AllocationStatus(name, handle, "running", connection.why() if silent else connection.skew)

    def cancel(self, handle: str) -> None:
        host, tag, allocation = command.of_handle(handle)
        connection = self._connections.get(host)
        if connection is None:
            raise AllocationRefused(
                f"{host} is no longer a host of pool {self.pool}",
                where=handle,
                do=f"add it to [pool.{self.pool}] again until {allocation} has stopped",
            )
        self._make_control_directory()
        try:
            last_error = connection.error
            if last_error is not None and connection.list(tag) is None:
                raise last_error
            call = {"do": "cancel", "tag": tag, "allocation": allocation}
            reply = connection.call(call, command.GRACE_S + CANCEL_MARGIN_S)
        except HostError as failure:
            error = failure.error
            raise EngineUnreachable(error.what, where=handle, why=error.why, do=error.do) from None
        if reply["state"] != "stopped":
            pids = ", ".join(map(str, reply["pids"]))
            raise EngineUnreachable(f"{allocation} did not stop", where=handle, why=f"still running: pids {pids}")
        connection.remove_allocation(tag, allocation)

    def clean_up(self, tag: str, active: Collection[str]) -> None:
        self._make_control_directory()
        call = {"do": "clean_up", "tag": tag, "active": sorted(active), "keep_s": KEEP_S}
        for connection in [connection for connection in self._connections.values() if connection.error is None]:
            # Whatever could not be removed is removed the next time.
            with contextlib.suppress(HostError):
                connection.call(call, CLEAN_UP_S)

    def capacity(self) -> list[Capacity]:
        replies = self._list_all(NO_TAG, gpus=True)
        return [self._capacity_of(self._connections[host], reply) for host, reply in replies.items()]

    def _capacity_of(self, connection: HostConnection, reply: Json | None) -> Capacity:
        if reply is None:
            return Capacity(connection.host, 0, why=connection.why())
        running = _running(reply)
        why = [f"{running} of at most {counted(connection.room, 'allocation')} running"] if running else []
        if reply["load"] > reply["cpus"]:
            why.append(f"load {reply['load']:.1f} on {reply['cpus']} processors")
        if reply["disk_free_bytes"] < LOW_DISK_BYTES:
            why.append(f"only {reply['disk_free_bytes'] / (1 << 20):.0f} MiB of disk are free")
        why += [connection.skew] if connection.skew else []
        room = _room(connection, NO_TAG)
        return Capacity(connection.host, room, reply["cpus"], reply["gpus"], reply["memory_bytes"], "; ".join(why))

    # --- all hosts

    def _list_all(self, tag: str, *, within_s: float = 0.0, gpus: bool = False) -> dict[str, Json | None]:
        """Return each host's list of allocations, at most `within_s` old; None for hosts that do not answer."""
        self._make_control_directory()
        with ThreadPoolExecutor(self._ssh.parallel, thread_name_prefix="shoal-ssh") as pool:
            list_one = partial(HostConnection.list, tag=tag, within_s=within_s, gpus=gpus)
            return dict(zip(self._connections, pool.map(list_one, self._connections.values()), strict=True))

    def _make_control_directory(self) -> None:
        try:
            if not os.path.isdir(self._control):
                _remove_stale_control_directories(self._control.rpartition("-")[0])
                os.makedirs(self._control, mode=0o700, exist_ok=True)
        except OSError as error:
            raise EngineUnreachable(
                "cannot create the directory for ssh's sockets", where=self._control, why=error.strerror or ""
            ) from error


class _BackgroundTasks:
    """Daemon threads, at most `parallel` at work; the process does not wait for them when it ends."""

    def __init__(self, parallel: int) -> None:
        self._slots = threading.Semaphore(parallel)

    def __call__(self, task: Callable[[], object]) -> None:
        threading.Thread(target=self._run, args=(task,), name="shoal-ssh-later", daemon=True).start()

    def _run(self, task: Callable[[], object]) -> None:
        with self._slots:
            task()


def _disconnect(options: SshOptions, hosts: set[str], control: str) -> None:
    """Close shared connections and remove the directory of their sockets."""
    if os.path.isdir(control):
        host_connection.disconnect(options, hosts, control)
        shutil.rmtree(control, ignore_errors=True)


def _remove_stale_control_directories(prefix: str) -> None:
    """Remove directories of coordinators that were killed; one with a socket in it is not empty and stays."""
    for path in glob.glob(f"{prefix}-*"):
        with contextlib.suppress(OSError):
            directory = os.stat(path, follow_symlinks=False)
            if directory.st_uid == os.getuid() and time.time() - directory.st_mtime > STALE_CONTROL_S:
                os.rmdir(path)


def _running(reply: Json) -> int:
    return int(reply["others"]) + sum(bool(remote["alive"]) for remote in reply["allocations"])


def _room(connection: HostConnection, tag: str) -> int:
    """Return how many more allocations a host takes, as far as is known."""
    reply = connection.last_reply(tag)
    return max(0, connection.room - (_running(reply) if reply is not None else 0))


def _full(running: int, connection: HostConnection) -> str:
    return f"it is full: {running} of at most {counted(connection.room, 'allocation')} running"
