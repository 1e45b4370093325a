"""Fuzzer of every port that a run opens: the coordinator's, those of members and servers, and the doctor's.

Anybody who reaches a port may send anything, so nothing that arrives may end a thread, fill the memory, put a traceback
into the log or an event into the journal that cannot be read back. `PortFuzzer` sends messages of all kinds to all
ports, chosen by one seed. The test around it then shows that the run still trains after a loss.

    kind        what is sent
    strangers   bytes to a member's, server's or doctor's port: noise, damaged hellos, hellos without a proof, silence
    peers       after a proven hello with the run's token: noise, damaged and impossible calls
    http        noise and damaged requests to the coordinator, without, with a wrong and with the right token
    websocket   as a member or an agent: messages with the odd values of their types, damaged messages, noise

What the owner of a token may do is not fuzzed: no request stops, scales or shuts down what it finds.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import socket
import struct
import threading
import typing
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import websockets.exceptions
from msgspec import inspect
from websockets.sync.client import ClientConnection, connect

import shoal
from shoal.core.world import Address, Seat
from shoal.wire import agent_messages, api, credentials, member_messages
from shoal.wire.protocol import PROTOCOL
from shoal.worker.parameter_server import rpc
from shoal.worker.transport import handshake
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import PeerHello
from shoal.worker.transport.peers import Peers

TIMEOUT_S = 20.0
REPLY_S = 0.05
MAX_HALF_OPEN = 100
WEIGHTS = {"strangers": 12, "peers": 3, "http": 3, "websocket": 2}
ODD_INTEGERS = (0, 1, -1, 255, 1 << 31, 1 << 53, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
ODD_FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, -1.0, 1e9, 1e300)
ODD_TEXTS = (
    "",
    "\0",
    "\n\x1b[2J",
    "é" * 200,
    "../../etc",
    "x" * 300,
    "x" * 70_000,
    "\ud7ff\uffff",
    "1-99999999999999999999",
)
HANDLED = (OSError, http.client.HTTPException, websockets.exceptions.WebSocketException, ExchangeBroken, TimeoutError)


@dataclass(frozen=True, slots=True)
class PeerPort:
    """A port that speaks the handshake of members, and the identity that listens there."""

    address: Address
    run: str
    member: str
    incarnation: str


class Garbage:
    """Random bytes and values, from one generator."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def noise(self, most: int = 2000) -> bytes:
        return self.dice.randbytes(self.dice.choice((0, 1, 8, 18, 64, self.dice.randrange(most))))

    def damaged(self, data: bytes) -> bytes:
        """Return the bytes with a few of them changed, removed or repeated."""
        dice, buffer = self.dice, bytearray(data)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(buffer) + 1)
            change = dice.randrange(4)
            if change == 0 and at < len(buffer):
                buffer[at] = dice.randrange(256)
            elif change == 1:
                del buffer[at:]
            elif change == 2:
                buffer[at:at] = self.noise(40)
            else:
                buffer += buffer[at : at + 300]
        return bytes(buffer[:1_000_000])

    def value(self, kind: inspect.Type, depth: int = 0) -> Any:
        """Return a value of this type, or now and then one that is not."""
        dice = self.dice
        if dice.random() < 0.03 or depth > 6:
            return self.odd()
        match kind:
            case inspect.BoolType():
                return dice.random() < 0.5
            case inspect.IntType(ge=least, le=most):
                return dice.choice((least or 0, most or 1 << 53, dice.choice(ODD_INTEGERS), dice.randrange(100)))
            case inspect.FloatType():
                return dice.choice((*ODD_FLOATS, dice.random(), dice.random()))
            case inspect.StrType():
                return dice.choice((*ODD_TEXTS, "local/0", "fuzz", "fuzz/1"))
            case inspect.BytesType():
                return self.noise()
            case inspect.NoneType():
                return None
            case inspect.LiteralType(values=values):
                return dice.choice(values)
            case inspect.UnionType(types=types):
                return self.value(dice.choice(types), depth + 1)
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                return [self.value(item, depth + 1) for _ in range(dice.choice((0, 1, 2, 5)))]
            case inspect.TupleType(item_types=items):
                return [self.value(item, depth + 1) for item in items]
            case inspect.DictType(key_type=key, value_type=entry):
                keys = [self.value(key, depth + 1) for _ in range(dice.choice((0, 1, 3)))]
                return {str(name): self.value(entry, depth + 1) for name in keys}
            case inspect.StructType() | inspect.DataclassType():
                return self.fields(kind, depth)
            case _:
                return self.odd()

    def fields(self, kind: inspect.StructType | inspect.DataclassType, depth: int = 0) -> dict[str, Any]:
        """Return a struct as a dict, with its tag; optional fields may be missing."""
        fields = {
            field.encode_name: self.value(field.type, depth + 1)
            for field in kind.fields
            if field.required or self.dice.random() < 0.5
        }
        if isinstance(kind, inspect.StructType) and kind.tag_field is not None:
            fields[kind.tag_field] = kind.tag
        return fields

    def odd(self) -> Any:
        return self.dice.choice((None, True, [], {}, [[]] * 3, {"type": 1}, *ODD_INTEGERS, *ODD_FLOATS, *ODD_TEXTS))

    def message(self, kind: Any) -> bytes:
        """Return a message of this type in MessagePack, sometimes damaged, or one that is nested too deep."""
        if self.dice.random() < 0.02:
            return b"\x91" * 5000
        packed = msgspec.msgpack.encode(self.fields(inspect.type_info(kind)))  # type: ignore[arg-type]
        return self.damaged(packed) if self.dice.random() < 0.3 else packed


class PortFuzzer:
    """Sends messages to the ports of one run; `ports` returns those of its present members."""

    def __init__(
        self, url: str, access: credentials.Credentials, run: str, ports: Callable[[], list[PeerPort]], seed: int
    ) -> None:
        self._url, self._access, self._run, self._ports = url, access, run, ports
        self.dice = random.Random(seed)
        self._garbage = Garbage(self.dice)
        self._half_open: deque[socket.socket] = deque()
        self._request: http.client.HTTPConnection | None = None
        self._peers: dict[str, Peers] = {}
        self._targets: list[PeerPort] = []
        self._never = threading.Event()
        self.sent: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()

    def send(self, messages: int) -> None:
        """Send so many messages, to ports and of kinds by chance."""
        kinds, weights = zip(*WEIGHTS.items(), strict=True)
        for number in range(messages):
            if number % 200 == 0:
                self._targets = self._ports()
            kind = self.dice.choices(kinds, weights)[0]
            try:
                getattr(self, f"_send_{kind}")()
            except HANDLED:
                self.unanswered[kind] += 1
            self.sent[kind] += 1

    def close(self) -> None:
        for sock in self._half_open:
            sock.close()
        if self._request is not None:
            self._request.close()
        for peers in self._peers.values():
            peers.close()

    # --- ports of members, servers and the doctor

    def _send_strangers(self) -> None:
        target = self.dice.choice(self._targets)
        packed = handshake.pack(self._hello(target))
        data = self.dice.choice(
            (
                self._garbage.noise(),
                self._garbage.damaged(packed),
                packed,
                packed + self._garbage.noise(64),
                packed[: self.dice.randrange(len(packed))],
                handshake.PREFIX.pack(handshake.MAGIC, len(packed)) + self._garbage.message(PeerHello),
                b"\x16\x03\x01" + self._garbage.noise(),
                b"GET / HTTP/1.1\r\n\r\n",
            )
        )
        self._raw(target.address.host, target.address.port, data)

    def _hello(self, target: PeerPort) -> PeerHello:
        dice = self.dice
        return PeerHello(
            kind=dice.choice((handshake.RING, handshake.STATE, handshake.CALL, handshake.COPY)),
            run=target.run,
            world=dice.choice((0, 1, 2, 5, 10**6)),
            member=f"fuzz/{dice.randrange(5)}",
            incarnation=dice.choice(("first", "", "x" * 300)),
            to_member=target.member,
            to_incarnation=target.incarnation,
            nonce=dice.randbytes(handshake.NONCE_BYTES),
        )

    def _send_peers(self) -> None:
        target = self.dice.choice(self._targets)
        peers = self._peers.get(target.run)
        if peers is None:
            peers = self._peers[target.run] = Peers(self._access.token.encode(), target.run, "fuzz/0", "1", "127.0.0.1")
        seat = Seat(target.member, target.incarnation, target.address)
        kind = self.dice.choice((handshake.RING, handshake.STATE, handshake.CALL, handshake.COPY))
        world = self.dice.choice((0, 1, 3, 10**6, self.dice.randrange(10**9)))
        with peers.connect(kind, world, seat, TIMEOUT_S, self._never) as sock:
            sock.settimeout(REPLY_S)
            sock.sendall(self._call())
            if self.dice.random() < 0.3:
                sock.recv(1 << 16)

    def _call(self) -> bytes:
        """Return a frame of the parameter servers' calls, or noise."""
        if self.dice.random() < 0.2:
            return self._garbage.noise()
        packed = self._garbage.message(self.dice.choice(typing.get_args(rpc.AnyCall)))
        body = self._garbage.noise(200)
        announced = self.dice.choice((len(body), len(body), 0, 1 << 40, (1 << 64) - 1))
        return rpc._PREFIX.pack(rpc._MAGIC, len(packed), announced) + packed + body

    # --- the coordinator's port

    def _send_http(self) -> None:
        if self.dice.random() < 0.3:
            place = urlsplit(self._url)
            lines = f"POST /v1/runs HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: 20\r\n\r\n".encode()
            self._raw(
                place.hostname or "", place.port or 0, self.dice.choice((self._garbage.noise(), self._damaged(lines)))
            )
            return
        run = self.dice.choice((self._run, "elsewhere", "%00", "x" * 500, "..%2f.."))
        method, path, kind = self.dice.choice(
            (
                ("GET", "/v1/runs", None),
                ("GET", f"/v1/runs/{run}", None),
                ("GET", f"/v1/runs/{run}/story?limit={self.dice.choice(ODD_INTEGERS)}", None),
                ("GET", f"/v1/runs/{run}/logs?after={self.dice.choice(ODD_INTEGERS)}&member=fuzz", None),
                ("GET", f"/v1/runs/{run}/logs?after=x&limit=%ff", None),
                ("GET", "/metrics", None),
                ("GET", "/v1/agents", None),
                ("POST", "/v1/runs/elsewhere/stop", api.StopRequest),
                ("POST", "/v1/runs/elsewhere/scale", api.ScaleRequest),
                ("POST", "/v1/runs", api.SubmitRequest),
                ("POST", "/v1/allocations/elsewhere", api.SetupReport),
                ("POST", "/v1/blobs", None),
                ("PUT", "/v1/blobs/" + "0" * 64, None),
                ("DELETE", f"/v1/runs/{run}", None),
            )
        )
        self._ask(method, path, self._body(kind))

    def _damaged(self, data: bytes) -> bytes:
        return self._garbage.damaged(data)

    def _body(self, kind: Any) -> bytes:
        if kind is None:
            return self.dice.choice((b"", b'"\xff\xff"', b"[" * 5000, b"null", self._garbage.noise()))
        fields = self._garbage.fields(inspect.type_info(kind))  # type: ignore[arg-type]
        fields["surplus"] = 1  # never quite right, so that no request is carried out
        return self._garbage.damaged(body) if (body := _json(fields)) and self.dice.random() < 0.3 else body

    def _ask(self, method: str, path: str, body: bytes) -> None:
        token = self.dice.choice((None, "wrong", self._access.token, self._access.token))
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if self._request is None:
            place = urlsplit(self._url)
            host, port = place.hostname or "", place.port
            context = credentials.ssl_context(self._access)
            self._request = (
                http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
                if context is None
                else http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
            )
        try:
            self._request.request(method, path, body, headers)
            self._request.getresponse().read()
        except HANDLED:
            self._request.close()
            self._request = None
            raise

    def _send_websocket(self) -> None:
        as_member = self.dice.random() < 0.6
        union = member_messages.FromMember if as_member else agent_messages.FromAgent
        with self._open("/v1/member" if as_member else "/v1/agent") as websocket:
            if self.dice.random() < 0.7:
                websocket.send(_member_hello(self._run, self.dice) if as_member else self._agent_hello())
            for _ in range(self.dice.randrange(1, 6)):
                websocket.send(self._garbage.message(self.dice.choice(typing.get_args(union))))
            if self.dice.random() < 0.2:
                websocket.send(self.dice.choice(("text", self._garbage.noise())))
            if self.dice.random() < 0.3:
                with contextlib.suppress(TimeoutError):
                    websocket.recv(timeout=REPLY_S)

    def _agent_hello(self) -> bytes:
        info: Any = inspect.type_info(agent_messages.AgentHelloMsg)
        known = {"protocol": PROTOCOL, "version": shoal.__version__, "agent": "fuzz", "name": "fuzz"}
        fields = self._garbage.fields(info)
        return msgspec.msgpack.encode(fields | {name: value for name, value in known.items() if name in fields})

    def _open(self, path: str) -> ClientConnection:
        return connect(
            self._url.replace("http", "ws", 1) + path,
            ssl=credentials.ssl_context(self._access),
            additional_headers=self._access.headers,
            open_timeout=TIMEOUT_S,
            close_timeout=REPLY_S,
            compression=None,
            proxy=None,
        )

    # --- sockets

    def _raw(self, host: str, port: int, data: bytes) -> None:
        """Send bytes from some address of the loopback network; then wait for the end, leave, reset or stay silent."""
        sock = socket.socket()
        sock.settimeout(TIMEOUT_S)
        with contextlib.suppress(OSError):
            sock.bind((f"127.{self.dice.randrange(1, 250)}.0.{self.dice.randrange(1, 250)}", 0))
        try:
            sock.connect((host, port))
            sock.sendall(data)
            end = self.dice.random()
            if end < 0.02:
                self._half_open.append(sock)
                if len(self._half_open) > MAX_HALF_OPEN:
                    self._half_open.popleft().close()
                return
            if end < 0.05:
                sock.settimeout(REPLY_S)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1 << 12)
        except BaseException:
            sock.close()
            raise
        if self.dice.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


def _member_hello(run: str, dice: random.Random) -> bytes:
    hello = member_messages.MemberHelloMsg(
        protocol=PROTOCOL,
        version=shoal.__version__,
        run=run,
        member=f"fuzz/{dice.randrange(5)}",
        incarnation="1",
        address=Address("127.0.0.1", 9),
        pid=1,
        world=dice.choice((None, 0, 1, 1 << 53)),
        step=dice.choice((None, 0, 1 << 53)),
        broken=dice.random() < 0.5,
        done=False,
        role=dice.choice(("trainer", "")),
        early=False,
    )
    return msgspec.msgpack.encode(hello)


def _json(value: Any) -> bytes:
    """Encode as JSON with Infinity and NaN, as careless clients do."""
    return json.dumps(value, default=lambda raw: raw.hex()).encode()
