"""``python -m shoal.coordinator --dir D``: the service as a process."""

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
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import uvicorn

from shoal import exit_codes
from shoal.coordinator.http.auth import AuthMiddleware, is_loopback
from shoal.coordinator.http.routes import make_app
from shoal.coordinator.http.tokens import TokenStore
from shoal.coordinator.pools.provisioner import open_pools
from shoal.coordinator.server import listen as server_listen
from shoal.coordinator.server import tls
from shoal.coordinator.server.batching_selector import new_loop
from shoal.coordinator.server.idle_timeout import IdleTimeoutProtocol
from shoal.coordinator.server.websocket import DirectSocket
from shoal.coordinator.service import CoordinatorService
from shoal.core import addresses
from shoal.errors import BadCredentials, JournalUnwritable, ShoalError
from shoal.store.journal import Journal
from shoal.store.sqlite_views import SqliteViews
from shoal.wire import credentials
from shoal.wire.codec import MAX_MESSAGE_BYTES
from shoal.wire.pool_files import URLS

FILES = 1 << 16


def main(argv: list[str] | None = None) -> int:
    """Serve until told to go; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shoal.coordinator", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where its journal, token and logs are kept")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on, :: for all of both families; TLS off loopback"
    )
    parser.add_argument("--address", default="", help="addresses that machines elsewhere try first, with commas")
    parser.add_argument("--port", type=int, default=0, help="0 for any, or the one that it had before")
    parser.add_argument("--lifeline", type=int, default=None, help="descriptor whose end of file ends the coordinator")
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
    """Take the descriptors that we may have: the usual 1,024 are spent by 500 agents and their members."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _serve(directory: Path, host: str, port: int, lifeline: int | None, named: tuple[str, ...]) -> int:
    _make_directory(directory)
    journal = Journal(directory)
    try:
        secure = not is_loopback(host)
        token = _keep_token(directory, tls.ensure(directory, host) if secure else None)
        listeners = server_listen.listen(host, port or _port_before(directory))
    except BaseException:
        journal.close()
        raise
    service = CoordinatorService(directory, journal, SqliteViews(directory), name=directory.resolve().name)
    service.replay()
    server = _Server(_config(service, token, directory, host, secure, lambda: server.end()))
    _announce(directory, server_listen.urls(host, listeners[0].getsockname()[1], secure, named))
    if lifeline is not None:
        asyncio.get_running_loop().add_reader(lifeline, _on_lifeline, lifeline, server)
    hiring = open_pools(service, directory)
    keepers = [asyncio.create_task(service.keep_time()), asyncio.create_task(service.keep_views())]
    for keeper in keepers:
        keeper.add_done_callback(server.keeper_ended)
    # A pause to collect garbage would be added to every recovery; what is here by now stays anyway.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        await server.serve(sockets=listeners)
    finally:
        await service.settle(keepers)
        if hiring is not None:
            await hiring.close(server.for_good)
        service.close()
        (directory / "pid").unlink(missing_ok=True)
    return 1 if server.failed else 0


class _Server(uvicorn.Server):
    """Leaves at once: members find the coordinator again, so nobody needs to be waited for.

    `for_good` says that none comes after it, so that nothing that it hired may be left.
    """

    failed = False
    for_good = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.leave()

    def end(self) -> None:
        self.for_good = True
        self.leave()

    def leave(self) -> None:
        self.should_exit = True
        self.force_exit = True

    def keeper_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            sys.stderr.write(f"the coordinator stops: {task.exception()!r}\n")
            self.failed = True
            self.leave()


def _config(
    service: CoordinatorService, token: str, directory: Path, host: str, secure: bool, leave: Callable[[], None]
) -> uvicorn.Config:
    config = uvicorn.Config(
        AuthMiddleware(make_app(service, leave), TokenStore(directory, token), loopback_only=is_loopback(host)),  # type: ignore[arg-type]
        http=IdleTimeoutProtocol,
        ws=DirectSocket,
        ws_max_size=MAX_MESSAGE_BYTES,
        # Only to notice sockets whose other end vanished without a word; leases are renewed by beats.
        ws_ping_interval=40.0,
        ws_ping_timeout=30.0,
        ws_per_message_deflate=False,
        access_log=False,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=1,
        server_header=False,
        date_header=False,
        ssl_certfile=str(directory / tls.CERTIFICATE) if secure else None,
        ssl_keyfile=str(directory / tls.KEY) if secure else None,
    )
    config.load()
    if config.ssl is not None:
        tls.be_sparing()
        # A ticket looks like an answer to a member that has not asked yet; it would wait in a read without a timeout.
        config.ssl.num_tickets = 0
    return config


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / "runs").mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise _unkept(directory, error) from error


def _unkept(directory: Path, error: OSError) -> JournalUnwritable:
    return JournalUnwritable(
        "the coordinator cannot keep anything in its directory",
        where=str(directory),
        why=error.strerror or str(error),
        do="make room, mend its permissions, or give another with --dir or SHOAL_HOME",
    )


def _keep_token(directory: Path, certificate_pem: str | None) -> str:
    """The token of this directory, made on first use."""
    path = directory / "token"
    token = secrets.token_urlsafe(32)
    if path.exists():
        with contextlib.suppress(BadCredentials):
            token = credentials.read(path).token
    credentials.write(path, credentials.Credentials(token, certificate_pem))
    return token


def _port_before(directory: Path) -> int:
    """The port of this directory's coordinator before, where its members look for it; 0 if there was none."""
    try:
        return urlsplit((directory / "url").read_text("ascii").strip()).port or 0
    except (OSError, ValueError):
        return 0


def _announce(directory: Path, urls: server_listen.Urls) -> None:
    try:
        _write(directory / "pid", f"{os.getpid()}\n")
        # Whoever waits for the first may read the second.
        _write(directory / URLS, "".join(f"{url}\n" for url in urls.elsewhere))
        _write(directory / "url", f"{urls.here}\n")
    except OSError as error:
        raise _unkept(directory, error) from error


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, "ascii")
    os.replace(part, path)


def _on_lifeline(descriptor: int, server: _Server) -> None:
    if os.read(descriptor, 4096) == b"":
        asyncio.get_running_loop().remove_reader(descriptor)
        server.end()


if __name__ == "__main__":
    sys.exit(main())
