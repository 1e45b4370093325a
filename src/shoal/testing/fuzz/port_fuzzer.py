"""Fuzzer of every port that a run opens: the coordinator's, those of members and servers, and the doctor's.

Anybody who reaches a port may send anything, and an honest client may have a bug. So nothing that arrives may end a
thread, fill the memory, put a traceback into the log or an event into the journal that cannot be read back.
`PortFuzzer` sends messages of all kinds to all ports, chosen by one seed. The test around it then shows that the run
still trains after a loss.

    kind        what is sent
    strangers   bytes to a member's, server's or doctor's port: noise, damaged hellos, hellos without a proof, silence
    peers       after a proven hello with the run's token: calls of parameter servers with odd values, noise
    http        noise and damaged requests to the coordinator; requests without, with a wrong and with a valid token
    websocket   as a member or an agent: messages with the odd values of their types, damaged messages, noise

A message is one request, frame or call; several go over one connection, up to the first after which the other side
hangs up. Requests of the owner of a token are carried out, but none stops or shuts down what has to train on.
"""

from __future__ import annotations

import contextlib
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

import shoal
from shoal.core.world import Address, Seat
from shoal.errors import BadMessage
from shoal.testing.fuzz import clients
from shoal.testing.fuzz.odd_values import OddValues
from shoal.testing.fuzz.requests import ApiRequests
from shoal.wire import agent_messages, codec, credentials, member_messages
from shoal.wire.protocol import PROTOCOL
from shoal.worker.parameter_server import rpc
from shoal.worker.transport import handshake
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import PeerHello
from shoal.worker.transport.peers import Peers

# Far above what a loaded machine needs, and above the time that a machine may take for a check of the doctor.
TIMEOUT_S = 150.0
REPLY_S = 0.05
MAX_HALF_OPEN = 100
# Connections that the coordinator is going to close, and those to members, which stay open.
MAX_AWAITED, MAX_PARKED = 32, 24
MAX_BURST = 24
# Turns, not messages: a turn of strangers is one message, the others send up to MAX_BURST each.
WEIGHTS = {"strangers": 30, "peers": 3, "http": 2, "websocket": 3}
PORTS_EVERY = 200
MAX_REFUSED = 500


@dataclass(frozen=True, slots=True)
class PeerPort:
    """A port that speaks the handshake of members, and the identity that listens there."""

    address: Address
    run: str
    member: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class FuzzedCoordinator:
    """What a fuzzer knows of a coordinator: its address, tokens of its owner and of a user, a run and its agents."""

    url: str
    access: credentials.Credentials
    user_token: str
    run: str
    members: tuple[int, int]
    agents: list[str]


class PortFuzzer:
    """Sends messages to the ports of one run; `ports` returns those of its present members.

    `unanswered` counts connections that the other side refused or dropped; `late` those to the coordinator that it has
    not answered in TIMEOUT_S seconds, which must not happen.
    """

    def __init__(self, target: FuzzedCoordinator, ports: Callable[[], list[PeerPort]], seed: int) -> None:
        self._target, self._ports = target, ports
        self.dice = random.Random(seed)
        self._odd = OddValues(self.dice)
        self._requests = ApiRequests(self._odd, target.run, target.members, target.agents)
        self._coordinator = clients.Coordinator(target.url, credentials.ssl_context(target.access))
        self._half_open: deque[socket.socket] = deque()
        self._parked: deque[socket.socket] = deque()
        self._awaited = clients.OpenConnections(MAX_AWAITED, TIMEOUT_S)
        self._peers: dict[str, Peers] = {}
        self._targets: list[PeerPort] = []
        self._never = threading.Event()
        self.sent: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.late: Counter[str] = Counter()

    def send(self, messages: int) -> None:
        """Send so many messages, to ports and of kinds by chance."""
        kinds, weights = zip(*WEIGHTS.items(), strict=True)
        until, turn, refused = self.sent.total() + messages, 0, 0
        while (remaining := until - self.sent.total()) > 0:
            if turn % PORTS_EVERY == 0:
                self._targets = self._ports()
            turn += 1
            kind = self.dice.choices(kinds, weights)[0]
            try:
                self.sent[kind] += getattr(self, f"_send_{kind}")(min(MAX_BURST, remaining))
                refused = 0
            except (OSError, ExchangeBroken):
                self.unanswered[kind] += 1
                refused += 1
                assert refused < MAX_REFUSED, "no port answers any more"
        self.late.update(self._awaited.drain())

    def close(self) -> None:
        for sock in (*self._half_open, *self._parked):
            sock.close()
        self._awaited.close()
        for peers in self._peers.values():
            peers.close()

    # --- ports of members, servers and the doctor

    def _send_strangers(self, _most: int) -> int:
        target = self.dice.choice(self._targets)
        packed = handshake.pack(self._hello(target))
        match self.dice.randrange(8):
            case 0:
                data = self._odd.noise()
            case 1:
                data = self._odd.damaged(packed)
            case 2:
                data = packed
            case 3:
                data = packed + self._odd.noise(64)
            case 4:
                data = packed[: self.dice.randrange(len(packed))]
            case 5:
                data = handshake.PREFIX.pack(handshake.MAGIC, len(packed)) + self._odd.message(PeerHello)
            case 6:
                data = b"\x16\x03\x01" + self._odd.noise()
            case _:
                data = b"GET / HTTP/1.1\r\n\r\n"
        self._raw(target.address.host, target.address.port, data)
        return 1

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

    def _send_peers(self, most: int) -> int:
        """Send calls over one proven connection, up to the first that is malformed."""
        target = self.dice.choice(self._targets)
        peers = self._peers.get(target.run)
        if peers is None:
            token = self._target.access.token.encode()
            peers = self._peers[target.run] = Peers(token, target.run, "fuzz/0", "1", "127.0.0.1")
        seat = Seat(target.member, target.incarnation, target.address)
        kind = self.dice.choice((handshake.RING, handshake.STATE, handshake.CALL, handshake.CALL, handshake.COPY))
        world = self.dice.choice((0, 1, 3, 10**6, self.dice.randrange(10**9)))
        calls = self._calls(self.dice.randrange(1, most + 1))
        sock = peers.connect(kind, world, seat, TIMEOUT_S, self._never)
        # The replies are not read: a server that waits for its reader must not wait for ever, nor in its only thread.
        self._parked.append(sock)
        if len(self._parked) > MAX_PARKED:
            self._parked.popleft().close()
        sock.settimeout(REPLY_S)
        with contextlib.suppress(TimeoutError):
            sock.sendall(b"".join(calls))
        return len(calls)

    def _calls(self, number: int) -> list[bytes]:
        """Return so many frames of calls to a parameter server, or fewer, of which only the last may be malformed."""
        calls: list[bytes] = []
        while len(calls) < number:
            if self.dice.random() < 0.05:
                return [*calls, self._odd.noise()]
            packed = self._odd.message(self.dice.choice(typing.get_args(rpc.AnyCall)), well_formed=0.8)
            body = self._odd.noise(200)
            announced = self.dice.choice((*(len(body),) * 30, 0, 1 << 40, (1 << 64) - 1))
            calls.append(rpc._PREFIX.pack(rpc._MAGIC, len(packed), announced) + packed + body)
            if announced != len(body) or not _decodes(rpc._calls.decode, packed):
                return calls
        return calls

    # --- the coordinator's port

    def _send_http(self, most: int) -> int:
        """Send a pipeline of requests; the last one ends the connection, and only it may be refused for its token."""
        if self.dice.random() < 0.3:
            place = urlsplit(self._coordinator.url)
            lines = f"POST /v1/runs HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: 20\r\n\r\n".encode()
            data = self.dice.choice((self._odd.noise(), self._odd.damaged(lines)))
            self._raw(place.hostname or "", place.port or 0, data)
            return 1
        number = self.dice.randrange(1, most + 1)
        data = b"".join(self._request(last=left == 0) for left in reversed(range(number)))
        sock = self._coordinator.connect(TIMEOUT_S)
        try:
            sock.sendall(data)
        finally:
            self.late.update(self._awaited.add("http", sock))
        return number

    def _request(self, last: bool) -> bytes:
        owner, user = self._target.access.token, self._target.user_token
        token = self.dice.choice((None, "wrong", owner) if last else (owner, owner, user))
        method, path, body = self._requests.any()
        return clients.request(method, path, self._coordinator.host, token, body, last)

    def _send_websocket(self, most: int) -> int:
        """Send messages as a member or an agent, up to the first that is malformed."""
        as_member = self.dice.random() < 0.6
        messages = self._messages(as_member, self.dice.randrange(1, most + 1))
        frames = [clients.frame(message) for message in messages]
        if self.dice.random() < 0.1:
            frames[-1] = clients.frame(self._odd.noise(100), self.dice.choice((0x81, 0x02, 0x80, 0x89, 0xFF)))
        early = self.dice.random() < 0.02
        sock = self._coordinator.connect(TIMEOUT_S)
        path = "/v1/member" if as_member else "/v1/agent"
        try:
            sock.sendall(clients.upgrade(path, self._coordinator.host, self._target.access.token))
            if not early:  # otherwise the messages come with the request; it loses them, and closes for want of a hello
                sock.recv(1 << 12)
            sock.sendall(b"".join(frames) + clients.CLOSE_FRAME)
        finally:
            self.late.update(self._awaited.add("websocket", sock))
        return len(frames)

    def _messages(self, as_member: bool, number: int) -> list[bytes]:
        """Return so many messages, or fewer, of which only the last may be malformed."""
        union = member_messages.FromMember if as_member else agent_messages.FromAgent
        decode: Callable[[bytes], object] = codec.from_member.decode if as_member else codec.from_agent.decode
        messages = [self._member_hello() if as_member else self._agent_hello()] if self.dice.random() < 0.8 else []
        while len(messages) < number:
            messages.append(self._odd.message(self.dice.choice(typing.get_args(union)), well_formed=0.85))
            if not _decodes(decode, messages[-1]):
                break
        return messages

    def _member_hello(self) -> bytes:
        hello = member_messages.MemberHelloMsg(
            protocol=PROTOCOL,
            version=shoal.__version__,
            run=self._target.run,
            member=f"fuzz/{self.dice.randrange(5)}",
            incarnation=self.dice.choice(("1", "2")),
            address=Address("127.0.0.1", 9),
            pid=1,
            world=self.dice.choice((None, 0, 1, 1 << 53)),
            step=self.dice.choice((None, 0, 1 << 53)),
            broken=self.dice.random() < 0.5,
            done=False,
            role=self.dice.choice(("trainer", "")),
            early=False,
        )
        return msgspec.msgpack.encode(hello)

    def _agent_hello(self) -> bytes:
        known = {"protocol": PROTOCOL, "version": shoal.__version__, "agent": "fuzz", "name": "fuzz"}
        fields: dict[str, Any] = self._odd.of(agent_messages.AgentHelloMsg, within=self.dice.random() < 0.7)
        return msgspec.msgpack.encode(fields | {name: value for name, value in known.items() if name in fields})

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
            if end < 0.03:
                sock.settimeout(REPLY_S)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1 << 12)
        except BaseException:
            sock.close()
            raise
        if self.dice.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


def _decodes(decode: Callable[[bytes], object], message: bytes) -> bool:
    try:
        decode(message)
    except (BadMessage, ValueError, RecursionError, OverflowError):
        return False
    return True
