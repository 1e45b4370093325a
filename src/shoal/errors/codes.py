"""Lookup of error classes by their code."""

from __future__ import annotations

from shoal.errors.base import ShoalError


def catalog() -> dict[str, type[ShoalError]]:
    """Return every loaded error class by its code, in the order of the codes."""
    classes: dict[str, type[ShoalError]] = {}
    pending: list[type[ShoalError]] = [ShoalError]
    while pending:
        error_class = pending.pop()
        classes[error_class.code] = error_class
        pending.extend(error_class.__subclasses__())
    return dict(sorted(classes.items()))


def from_code(code: str, what: str, *, where: str = "", why: str = "", do: str = "") -> ShoalError:
    """Return the error that another process described; a plain ShoalError if this version does not know the code."""
    return catalog().get(code, ShoalError)(what, where=where, why=why, do=do)
