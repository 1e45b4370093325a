"""Base class of all errors: four texts, a code and an exit code."""

from __future__ import annotations

from typing import ClassVar

from shoal import exit_codes


class ShoalError(Exception):
    """An error that Shoal can name.

    Every error that Shoal reports has a code, says what failed, and, where they are known, where, why and what to do
    about it.
    """

    code: ClassVar[str] = "S000"
    exit_code: ClassVar[int] = exit_codes.FAILED

    def __init__(self, what: str, *, where: str = "", why: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.do = do

    def __str__(self) -> str:
        lines = [f"error[{self.code}] {self.what}"]
        for label, text in (("where", self.where), ("why", self.why), ("do", self.do)):
            if text:
                lines.append(f"  {label:<6} {text}")
        lines.append(f"  {'more':<6} shoal explain {self.code}")
        return "\n".join(lines)

    def as_warning(self) -> str:
        """Return the text for a case in which work goes on."""
        return str(self).replace("error[", "warning[", 1)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle their positional arguments only, and three of the four texts are keywords.
        return (_rebuild, (type(self), self.what, self.where, self.why, self.do))


def _rebuild(kind: type[ShoalError], what: str, where: str, why: str, do: str) -> ShoalError:
    return kind(what, where=where, why=why, do=do)
