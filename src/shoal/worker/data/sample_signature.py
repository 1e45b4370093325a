"""Signatures of samples, by which members notice that they were given different data.

The length of a dataset does not tell whether its samples are the same: an unseeded `random_split` or data that a script
generates at its start have the same length everywhere, and then one member's validation samples are another's training
samples. So a few samples are read before a member joins, and their signatures are part of its fingerprint, which the
coordinator compares.

A signature must differ for different samples, and agree for the same sample read on another machine. Small integers,
texts and bytes count exactly; of larger arrays and of floating-point numbers only the shape, the type and two digits of
some elements, because decoders and vector units round differently.

Each sample is read twice. A sample that differs from itself is drawn from a random generator of the dataset's own,
which nothing seeds: it says nothing about the data and is left out, with a warning. Of a stream, the first samples are
read. If they differ each time, the stream adds noise to them or yields them in another order; only then samples would
be lost and others repeated, but the samples alone do not tell which of the two it is.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shoal.errors import UnseededData

SAMPLES = 4
# Arrays of up to this many integers are labels or indices, and count exactly.
EXACT_ELEMENTS = 16
# Of larger ones, and of floating-point numbers, this many are compared.
ELEMENTS = 16
MAX_DEPTH = 8


def signatures(
    read: Callable[[int], tuple[int, Any]], count: int, samples: int = SAMPLES, *, what: str = "sample"
) -> str:
    """Return signatures of `samples` of `count` samples as text; `read` maps a position to a number and its sample."""
    lines, random = [], []
    for position in sorted({index * (count - 1) // max(1, samples - 1) for index in range(samples)}):
        number, sample = read(position)
        first, second = signature(sample), signature(read(position)[1])
        if first == second:
            lines.append(f"{what} {number} {first}")
        else:
            random.append(number)
    if random:
        sys.stderr.write(f"{_unseeded(what, random[0]).as_warning()}\n")
    return ", ".join(lines) or "random"


def stream_signatures(read: Callable[[int], list[Any]], shards: int) -> str:
    """Return signatures of the first samples of the first and the last shard; `read` opens a shard and reads them."""
    return signatures(lambda shard: (shard, read(shard)), shards, 2, what="shard")


def _unseeded(what: str, number: int) -> UnseededData:
    if what == "shard":
        return UnseededData(
            f"shard {number} of the stream begins with other samples each time it is opened",
            why="it shuffles or augments with a random generator of its own; if it shuffles, a member that opens it "
            "later loses samples and repeats others",
            do="shuffle with a fixed seed; draw from Python's, NumPy's or torch's global generators, which are seeded",
        )
    return UnseededData(
        f"sample {number} differs each time it is read",
        why="the dataset draws from a random generator of its own, which is not seeded from the sample",
        do="draw from Python's, NumPy's or torch's global generators: they are seeded before each sample",
    )


def signature(sample: Any) -> str:
    """Return eight hexadecimal digits that stand for a sample."""
    return f"{zlib.crc32(_text(sample, 0).encode()):08x}"


def _text(value: Any, depth: int) -> str:
    if value is None or isinstance(value, bool | int | str | bytes):
        return repr(value)
    if isinstance(value, float):
        return f"{value:.1e}"
    if depth < MAX_DEPTH and isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item, depth + 1)}" for key, item in value.items()) + "}"
    if depth < MAX_DEPTH and isinstance(value, list | tuple):
        return "[" + ",".join(_text(item, depth + 1) for item in value) + "]"
    return _array_text(value)


def _array_text(value: Any) -> str:
    try:
        array = np.asarray(value.detach().float().cpu() if hasattr(value, "detach") and _is_half(value) else value)
    except (TypeError, ValueError, RuntimeError):
        return type(value).__name__
    if array.dtype.kind not in "biufc" or not array.size:
        return f"{type(value).__name__}{array.shape}"
    if array.dtype.kind in "biu" and array.size <= EXACT_ELEMENTS:
        return f"{array.shape}{array.ravel().tolist()}"
    elements = array.reshape(-1)[:: max(1, array.size // ELEMENTS)][:ELEMENTS]
    return f"{array.dtype.kind}{array.shape}" + " ".join(f"{element:.1e}" for element in elements.tolist())


def _is_half(tensor: Any) -> bool:
    """Return whether NumPy lacks the type of a tensor."""
    return "bfloat16" in str(tensor.dtype) or "float8" in str(tensor.dtype)
