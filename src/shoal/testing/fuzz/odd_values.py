"""Odd values: random bytes, and values at and beyond the edges of the types that messages are declared with."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

ODD_INTEGERS = (0, 1, -1, 255, 1 << 31, 1 << 53, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
ODD_FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, -1.0, 1e9, 1e300)
ODD_TEXTS = (
    "",
    "\0",
    "\n\x1b[2J",
    "é" * 200,
    "../../etc",
    "x" * 300,
    "x" * 70_000,
    "\ud7ff\uffff",
    "1-99999999999999999999",
)
NAMES = ("local/0", "fuzz", "fuzz/1")
type_info = cache(inspect.type_info)


class OddValues:
    """Random bytes and values, from one generator.

    A value `within` its type is one that a decoder accepts: at the edges as well, but not beyond them.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def noise(self, most: int = 2000) -> bytes:
        return self.dice.randbytes(self.dice.choice((0, 1, 8, 18, 64, self.dice.randrange(most))))

    def damaged(self, data: bytes) -> bytes:
        """Return the bytes with a few of them changed, removed or repeated."""
        dice, buffer = self.dice, bytearray(data)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(buffer) + 1)
            change = dice.randrange(4)
            if change == 0 and at < len(buffer):
                buffer[at] = dice.randrange(256)
            elif change == 1:
                del buffer[at:]
            elif change == 2:
                buffer[at:at] = self.noise(40)
            else:
                buffer += buffer[at : at + 300]
        return bytes(buffer[:1_000_000])

    def value(self, kind: inspect.Type, within: bool = False, depth: int = 0) -> Any:
        """Return a value of this type, or now and then, unless `within`, one that is not."""
        dice = self.dice
        if not within and (dice.random() < 0.03 or depth > 6):
            return self.odd()
        match kind:
            case inspect.BoolType():
                return dice.random() < 0.5
            case inspect.IntType(ge=least, le=most):
                return self._integer(least, most, within)
            case inspect.FloatType(ge=low, le=high):
                return self._float(low, high, within)
            case inspect.StrType(max_length=longest, pattern=pattern):
                text = dice.choice((*ODD_TEXTS, *NAMES, *NAMES))
                return ("min:loss" if pattern else text[:longest]) if within else text
            case inspect.BytesType():
                return self.noise()
            case inspect.NoneType():
                return None
            case inspect.LiteralType(values=values):
                return dice.choice(values)
            case inspect.UnionType(types=types):
                return self.value(dice.choice(types), within, depth + 1)
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                return [self.value(item, within, depth + 1) for _ in range(dice.choice((0, 1, 2, 5)))]
            case inspect.TupleType(item_types=items):
                return [self.value(item, within, depth + 1) for item in items]
            case inspect.DictType(key_type=key, value_type=entry):
                keys = [self.value(key, within, depth + 1) for _ in range(dice.choice((0, 1, 3)))]
                return {str(name): self.value(entry, within, depth + 1) for name in keys}
            case inspect.StructType() | inspect.DataclassType():
                return self.fields(kind, within, depth)
            case _:
                return self.odd()

    def _integer(self, least: int | None, most: int | None, within: bool) -> int:
        choices = (
            least or 0,
            1 << 53 if most is None else most,
            self.dice.choice(ODD_INTEGERS),
            self.dice.randrange(5),
        )
        number = self.dice.choice((*choices, self.dice.randrange(5), self.dice.randrange(100)))
        return min(max(number, least or 0), 1 << 53 if most is None else most) if within else number

    def _float(self, low: float | None, high: float | None, within: bool) -> float:
        number = self.dice.choice((*ODD_FLOATS, self.dice.random(), self.dice.random()))
        if within and low is not None and high is not None:
            return 0.0 if math.isnan(number) else min(max(number, low), high)
        return number

    def fields(
        self, kind: inspect.StructType | inspect.DataclassType, within: bool = False, depth: int = 0
    ) -> dict[str, Any]:
        """Return a struct as a dict, with its tag; optional fields may be missing."""
        fields = {
            field.encode_name: self.value(field.type, within, depth + 1)
            for field in kind.fields
            if field.required or self.dice.random() < 0.5
        }
        if isinstance(kind, inspect.StructType) and kind.tag_field is not None:
            fields[kind.tag_field] = kind.tag
        return fields

    def of(self, kind: Any, within: bool = False) -> dict[str, Any]:
        """Return the fields of a message of this class."""
        info: Any = type_info(kind)
        return self.fields(info, within)

    def odd(self) -> Any:
        return self.dice.choice((None, True, [], {}, [[]] * 3, {"type": 1}, *ODD_INTEGERS, *ODD_FLOATS, *ODD_TEXTS))

    def message(self, kind: Any, well_formed: float = 0.0) -> bytes:
        """Return a message of this class in MessagePack; by this chance it keeps to the schema."""
        if self.dice.random() < well_formed:
            return msgspec.msgpack.encode(self.of(kind, within=True))
        if self.dice.random() < 0.02:
            return b"\x91" * 5000
        packed = msgspec.msgpack.encode(self.of(kind))
        return self.damaged(packed) if self.dice.random() < 0.3 else packed


def to_json(value: Any) -> bytes:
    """Encode as JSON with Infinity and NaN, as careless clients do."""
    return json.dumps(value, default=lambda raw: raw.hex()).encode()
