"""A connection is closed when no complete request arrives in time; the timer does not keep it alive."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from shoal.coordinator.server import idle_timeout
from shoal.coordinator.server.idle_timeout import IdleTimeoutProtocol, _call_if_alive


async def well(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"well"})


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nG"])
def test_connection_without_a_whole_request_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(idle_timeout, "REQUEST_WITHIN_S", 0.02)

    async def received() -> bytes:
        config = uvicorn.Config(well, http=IdleTimeoutProtocol, lifespan="off", log_level="warning")
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()
        server = await loop.create_server(lambda: IdleTimeoutProtocol(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        data = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        server.close()
        return data

    data = asyncio.run(received())
    assert data.endswith(b"well") if b"\r\n\r\n" in sent else b"well" not in data


def test_timer_does_not_keep_its_connection_alive() -> None:
    class Connection:
        def close(self) -> None:
            raise AssertionError("it is gone")

    connection = Connection()
    close = weakref.WeakMethod(connection.close)
    del connection
    gc.collect()
    _call_if_alive(close)
    assert close() is None
