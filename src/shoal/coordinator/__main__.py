"""``python -m shoal.coordinator --dir D``: the coordinator as a process, composed of its parts in `_serve`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import sys
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette

from shoal import exit_codes
from shoal.coordinator.compaction import Compactor
from shoal.coordinator.http.auth import AuthMiddleware, is_loopback
from shoal.coordinator.http.routes import ApiRoutes
from shoal.coordinator.http.tokens import TokenStore
from shoal.coordinator.pools.provisioner import open_pools
from shoal.coordinator.server import listen as server_listen
from shoal.coordinator.server import tls
from shoal.coordinator.server.batching_selector import new_loop
from shoal.coordinator.server.connection_limit import ConnectionLimit, LimitedListener
from shoal.coordinator.server.idle_timeout import IdleTimeoutProtocol
from shoal.coordinator.server.log_limit import limit_logs
from shoal.coordinator.server.websocket import DirectSocket
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.storage import blobs, run_files
from shoal.coordinator.timers import Timers
from shoal.core import addresses
from shoal.errors import BadCredentials, BadDirectory, JournalUnwritable, ShoalError
from shoal.store.journal import Journal
from shoal.store.sqlite_views import SqliteViews
from shoal.wire import credentials
from shoal.wire.codec import MAX_MESSAGE_BYTES
from shoal.wire.pool_files import FILE as POOLS
from shoal.wire.pool_files import URLS

MAX_FILES = 1 << 16
SWEEP_UPLOADS_S = 60.0
SWEEP_BLOBS_S = 3600.0
OPEN_TO_OTHERS = 0o077
WRITTEN_BEFORE = {POOLS, "token", "tokens"}


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shoal.coordinator", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="directory of its journal, token and logs")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on, :: for all IPv4 and IPv6 addresses; uses TLS unless loopback",
    )
    parser.add_argument("--address", default="", help="addresses that other machines try first, separated by commas")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 for the previous one, or any")
    parser.add_argument(
        "--lifeline", type=int, default=None, help="file descriptor; the coordinator ends when it reaches end of file"
    )
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    _allow_many_connections()
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            named = addresses.split_list(options.address)
            return runner.run(_serve(options.dir.absolute(), options.host, options.port, options.lifeline, named))
    except ShoalError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def _allow_many_connections() -> None:
    """Raise the limit of open files: the usual 1,024 are used up by 500 agents and their members."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


async def _serve(directory: Path, host: str, port: int, lifeline: int | None, named: tuple[str, ...]) -> int:
    """Compose the coordinator from its parts, serve until it ends and return the exit code."""
    _make_directory(directory)
    journal = Journal(directory)
    try:
        secure = not is_loopback(host)
        token = _load_token(directory, tls.ensure(directory, host) if secure else None)
        listeners = server_listen.listen(host, port or _previous_port(directory))
    except BaseException:
        journal.close()
        raise
    limit = ConnectionLimit()
    listeners = [LimitedListener.take_over(listener, limit) for listener in listeners]
    service = CoordinatorService(directory, journal, SqliteViews(directory), name=directory.resolve().name)
    service.replay()
    routes = ApiRoutes(service, lambda: server.end_for_good())
    auth = AuthMiddleware(
        Starlette(routes=routes.routes()),  # type: ignore[arg-type]
        TokenStore(directory, token),
        is_loopback(host),
        limit.admit,
    )
    server = _Server(_config(auth, directory, secure))
    _announce(directory, server_listen.urls(host, listeners[0].getsockname()[1], secure, named))
    if lifeline is not None:
        asyncio.get_running_loop().add_reader(lifeline, _on_lifeline, lifeline, server)
    timers = Timers(service)
    timers.every_tick(limit.close_late)
    timers.every_tick(routes.agent_handler.close_silent)
    timers.every_tick(blobs.sweep_every(routes.blobs, service.state.projects, SWEEP_BLOBS_S))
    timers.every_tick(run_files.sweep_every(routes.files, lambda: list(service.state.runs), SWEEP_UPLOADS_S))
    provisioner = open_pools(service, directory)
    if provisioner is not None:
        timers.every_tick(provisioner.tick)
    compactor = Compactor(journal, service.views, service.encode_state)
    forever = (timers.run(), service.views.write_forever(), compactor.run())
    tasks = [asyncio.create_task(task) for task in forever]
    for task in tasks:
        task.add_done_callback(server.task_ended)
    _tune_garbage_collection()
    try:
        await server.serve(sockets=listeners)
    finally:
        await service.views.stop(tasks)
        if provisioner is not None:
            await provisioner.close(server.for_good)
        service.close()
        (directory / "pid").unlink(missing_ok=True)
    return exit_codes.FAILED if server.failed else exit_codes.OK


def _tune_garbage_collection() -> None:
    """Collect rarely, and never what exists by now: a pause would delay every recovery."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class _Server(uvicorn.Server):
    """HTTP server that ends at once: members reconnect to the next coordinator, so no connection is waited for.

    `for_good` means that no coordinator comes after this one, so all machines have to be released.
    """

    failed = False
    for_good = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._end()

    def end_for_good(self) -> None:
        self.for_good = True
        self._end()

    def _end(self) -> None:
        self.should_exit = True
        self.force_exit = True

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """End the process if a background task has failed."""
        if not task.cancelled() and task.exception() is not None:
            sys.stderr.write(f"the coordinator failed: {task.exception()!r}\n")
            self.failed = True
            self._end()


def _config(app: AuthMiddleware, directory: Path, secure: bool) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=IdleTimeoutProtocol,
        ws=DirectSocket,
        ws_max_size=MAX_MESSAGE_BYTES,
        # Only to notice peers that vanished without closing; heartbeats renew the leases.
        ws_ping_interval=40.0,
        ws_ping_timeout=30.0,
        ws_per_message_deflate=False,
        access_log=False,
        log_level="warning",
        lifespan="off",
        # A header must not say who the client is: limits and addresses of machines depend on it.
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        server_header=False,
        date_header=False,
        ssl_certfile=str(directory / tls.CERTIFICATE) if secure else None,
        ssl_keyfile=str(directory / tls.KEY) if secure else None,
    )
    config.load()
    limit_logs("uvicorn", "uvicorn.error", "uvicorn.access")
    if config.ssl is not None:
        tls.use_small_buffers()
        # A session ticket looks like data to a member that has not sent a request; it would block in a read.
        config.ssl.num_tickets = 0
    return config


def _make_directory(directory: Path) -> None:
    """Create the directory, or close an existing one to other users: it holds tokens and what users print."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if directory.stat().st_mode & OPEN_TO_OTHERS:
            if not (directory / "runs").is_dir() and {path.name for path in directory.iterdir()} - WRITTEN_BEFORE:
                raise _not_ours(directory)
            directory.chmod(0o700)
        (directory / "runs").mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise _directory_error(directory, error) from error


def _not_ours(directory: Path) -> BadDirectory:
    return BadDirectory(
        "the directory of a coordinator must be its own",
        where=str(directory),
        why="other users may enter it, and it holds files that are not a coordinator's",
        do="choose an empty directory, or a new one, with --dir",
    )


def _directory_error(directory: Path, error: OSError) -> JournalUnwritable:
    return JournalUnwritable(
        "the coordinator cannot write to its directory",
        where=str(directory),
        why=error.strerror or str(error),
        do="free space, fix its permissions, or choose another with --dir or SHOAL_HOME",
    )


def _load_token(directory: Path, certificate_pem: str | None) -> str:
    """Return the token of this directory, created on first use, and store it with the current certificate."""
    path = directory / "token"
    token = secrets.token_urlsafe(32)
    if path.exists():
        with contextlib.suppress(BadCredentials):
            token = credentials.read(path).token
    credentials.write(path, credentials.Credentials(token, certificate_pem))
    return token


def _previous_port(directory: Path) -> int:
    """Return the port of the previous coordinator, at which its members reconnect, 0 if there was none."""
    try:
        return urlsplit((directory / "url").read_text("ascii").strip()).port or 0
    except (OSError, ValueError):
        return 0


def _announce(directory: Path, urls: server_listen.Urls) -> None:
    """Write the files by which commands and agents find this coordinator."""
    try:
        _write(directory / "pid", f"{os.getpid()}\n")
        # A command that waits for `url` may read `urls` as well, so `url` is written last.
        _write(directory / URLS, "".join(f"{url}\n" for url in urls.remote))
        _write(directory / "url", f"{urls.local}\n")
    except OSError as error:
        raise _directory_error(directory, error) from error


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, "ascii")
    os.replace(part, path)


def _on_lifeline(descriptor: int, server: _Server) -> None:
    if os.read(descriptor, 4096) == b"":
        asyncio.get_running_loop().remove_reader(descriptor)
        server.end_for_good()


if __name__ == "__main__":
    sys.exit(main())
