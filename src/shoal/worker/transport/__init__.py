"""Bytes between members: listening, connecting, authenticating, and copying the training state.

Theory of operation
-------------------
Every member listens on one TCP port. Its peers connect there for different purposes, named by the `kind` in the first
message: `ring` (collectives of a world), `state` (a joiner fetches the training state), `call` and `copy` (parameter
servers). `Peers` is the object the rest of a member uses; everything else in this folder is behind it.

**Authentication.** Any process on the network can connect to the port, so each connection starts with a handshake in
which both sides prove that they know the run's token without sending it (`handshake`). The first message also names
run, world, member and incarnation of both sides. A member therefore never talks to an older incarnation of a peer, to
another run that reused the port, or to another machine behind the same address. Payload is not encrypted.

**Accepting** (`listener`). One thread serves the listening socket and two sets of connections:

    pending handshake   accepted, not authenticated: at most 64, 3 s each; when full, the oldest is closed
    idle peer           authenticated, not claimed yet: at most 512; a ring connection waits for 30 s

An idle peer exists because worlds are announced to all members at once and the fastest connects first: its connection
waits until this member, too, hears of the world and claims it by (kind, world, member). Connections for a world that
has ended, or that this member gave up, are refused, so that peers which wait for it notice at once.

**Connecting** (`connect`). A member may have several addresses, and some lead nowhere or to another process. They are
tried in the announced order, each one a moment after the previous one; the first at which the right member proves
itself wins. `AddressCache` remembers the winner for the next connection to the same machine. Every wait ends at a
deadline or when the caller cancels.

**Copying the state** (`state_transfer`, `snapshot`). The source offers a `Snapshot` to named readers and keeps
computing; a thread per reader streams it in chunks, each with a CRC-32. Chunks are read from live memory until the
source is about to change it; only what some reader still lacks at that moment is copied (`Snapshot.freeze`).

**Failure** is reported as `ExchangeBroken(cause, suspects)`. Suspects are the members whose connection failed here;
the coordinator decides what that means. A transfer that fails leaves nothing behind: the reader starts again in the
next world. Sockets are registered (`sockets.own`) so that a forked child closes them: a child that inherited one would
keep it open and hide this member's death from its peers.

May import: core, wire, settings, errors.
"""
