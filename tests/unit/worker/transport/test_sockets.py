from __future__ import annotations

import socket

from shoal.worker.transport.sockets import alive, disown, own, tune


def test_connection_is_alive_until_its_peer_closes() -> None:
    here, there = socket.socketpair()
    assert alive(own(here))
    there.close()
    assert not alive(here)
    disown(here)
    disown(here)  # an owner that gives up twice is no error


def test_disowned_socket_tells_the_peer_even_while_a_copy_is_open() -> None:
    here, there = socket.socketpair()
    copy = here.dup()
    disown(own(here))
    assert there.recv(1) == b""
    copy.close()
    there.close()


def test_tuned_connection_gives_up_a_machine_that_vanished() -> None:
    with socket.socket() as sock:
        tune(sock, 4321)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4321
