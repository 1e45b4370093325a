"""Decisions, pure: no sockets, no clock, no threads, no framework, no logging."""
