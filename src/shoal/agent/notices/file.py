"""Notices from a file: for batch scripts and schedulers that have no source of their own."""

from __future__ import annotations

from pathlib import Path

from shoal.agent.notices.source import Notice

_DEFAULT_S = 30.0


class FileSource:
    """File whose appearance is the notice. Its text is `SECONDS WHY`, both optional; rewriting it is a new notice."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self) -> Notice | None:
        try:
            changed = self._path.stat().st_mtime_ns
            with self._path.open(encoding="utf-8", errors="replace") as file:
                body = file.read(1000)
        except FileNotFoundError:
            return None
        return file_notice(body, str(changed))


def file_notice(body: str, key: str) -> Notice:
    """Return the notice that the text of the file describes."""
    first, _, rest = body.strip().partition(" ")
    try:
        within_s, detail = float(first), rest.strip()
    except ValueError:
        within_s, detail = _DEFAULT_S, body.strip()
    return Notice(max(0.0, within_s), "file", detail or "the file appeared", key)
