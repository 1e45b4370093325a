"""Decisions and values that need no clock, no socket and no thread; the rest of Shoal does the I/O around them.

Every state machine here is a function ``decide(state, event, now)`` that returns the next state and a tuple of
instructions. States and events are frozen values, so replaying the journal gives the same state, and tests need neither
processes nor sleep. This folder itself holds the values that several of its folders share: worlds, placements, step
reports, sync modes, addresses.

May import: the standard library, NumPy, shoal.errors, shoal.exit_codes.
"""
