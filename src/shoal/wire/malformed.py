"""The exceptions with which msgspec rejects bytes that a peer sent."""

from __future__ import annotations

MALFORMED = (ValueError, RecursionError, MemoryError)
"""Catch these around every decoding of bytes that another process sent.

msgspec's own errors are ValueErrors, but it lets others through: UnicodeDecodeError (also a ValueError) for a string
that is not UTF-8, RecursionError for deep nesting, MemoryError for a length that no machine holds. One that is not
caught ends the thread that reads the port.
"""
