"""The coordinator's state as bytes, for the snapshot of its journal.

The state is a tree of dataclasses, which msgpack stores by field name; unlike JSON it has infinities and keys that are
tuples. Decoding checks every type. Only the index of processes is no plain tree: it is stored as a table and built
again. The bytes belong to one protocol, as the events do.

Measurements are in no event but the last of a run, so the latest of each run are stored beside the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.core.fleet.state import ProcessState, ProcessTable
from shoal.core.runs.events import ProgressMeasured
from shoal.core.runs.state import CoordinatorState
from shoal.errors import JournalDamaged


@dataclass(frozen=True, slots=True)
class StoredState:
    """The state of a coordinator, and the latest measurement of each run."""

    state: CoordinatorState = field(default_factory=CoordinatorState)
    progress: Mapping[str, ProgressMeasured] = field(default_factory=dict)


def encode(stored: StoredState) -> bytes:
    """Return the state as bytes."""
    return msgspec.msgpack.encode(stored)


def decode(body: bytes) -> StoredState:
    """Return the state that was encoded, an empty one for no bytes at all; raise JournalDamaged."""
    if not body:
        return StoredState()
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise JournalDamaged("cannot decode the snapshot of the journal", why=str(error)) from error


def _decode_table(kind: type, value: Any) -> Any:
    if kind is not ProcessTable:
        raise TypeError(f"unexpected type {kind.__name__}")
    return ProcessTable(msgspec.convert(value, dict[tuple[str, str], ProcessState]))


_decoder = msgspec.msgpack.Decoder(StoredState, dec_hook=_decode_table)
