"""Sockets, WebSockets and TLS of the coordinator, tuned for a thousand connections to one process.

May import: core, wire, errors.
"""
