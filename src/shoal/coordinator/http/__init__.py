"""The HTTP API: routes, commands, authentication and metrics.

Every request and WebSocket passes `auth` first. There are two kinds of tokens. The coordinator's own token, in its
directory, belongs to its owner; agents and members have it too, and only it may open WebSockets, write files of runs or
shut the coordinator down. A named user has a token of their own, in `tokens/NAME`; it allows reading everything, and
submitting and changing that user's runs. Tokens are compared by hash, wrong ones are limited per client, and requests
that a foreign web page could have caused (by `Host` or `Origin`) are refused before the token is even looked at. Off
loopback all traffic is TLS with a certificate that clients pin.

May import: coordinator, coordinator.server, coordinator.storage, core, settings, wire, errors.
"""
