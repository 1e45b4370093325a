"""Data that crosses a process boundary: messages, HTTP bodies, credentials and small shared files.

Theory of operation
-------------------
A coordinator listens on one TCP port. Members and agents each keep one WebSocket to it; commands use HTTP on the same
port. Everything needs the coordinator's token, and with TLS the client trusts exactly the one certificate that came
with the token (`credentials`). Members exchange gradients and state directly with each other; that traffic does not
belong here but to `worker/transport`.

Messages. Each message is one frozen msgspec struct, encoded as MessagePack in one binary frame. Its tag is the class
name without `Msg`, so a message and the event that it becomes in the journal never share a Python name. There are four
unions, one for each direction of each kind of connection: `FromMember`, `ToMember`, `FromAgent`, `ToAgent`. A decoder
accepts exactly one union, so a member cannot send what only an agent may say.

Strictness. Unknown tags, unknown fields, missing fields, wrong types and frames over 1 MiB raise BadMessage; nothing is
guessed or ignored. Decoding never executes code: there is no pickle. Large messages (a world of a thousand members) are
compressed, and the decompressed size has the same limit.

Versions. `protocol.PROTOCOL` is the number of the whole language: messages, journalled events, and the layout of a
coordinator's directory. Both hellos carry it together with Shoal's version, and the coordinator rejects any other
(S202). There is no negotiation and no compatibility code: the processes of one run are started by one coordinator, so
they can be of one version. A directory written under another number is refused too (`store/journal`).

Delivery. A connection keeps messages in order but may break between any two of them. Nothing is acknowledged one by
one. Instead, hellos describe the present state, senders repeat what still matters after a reconnect, and receivers
ignore what they already know. So every message is safe to receive twice.

The modules: `protocol` (number and base class), `member_messages`, `agent_messages` with `machine_check`, `codec`;
`api` for HTTP; `credentials` and `pool_files` for files; `interfaces` and `connect_errors` for addresses and their
failures.

May import: shoal.core, shoal.errors, msgspec, psutil.
"""
