"""Sockets, WebSockets and TLS of the coordinator."""
