"""Configuration of a member, passed by its agent in environment variables; they are read only here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shoal.errors import BadSettings, IncompleteEnvironment
from shoal.settings import RunSettings, Value, parse_settings
from shoal.store.blob_store import CoordinatorAccess


@dataclass(frozen=True, slots=True)
class MemberEnvironment:
    """Identity of this member and the address of its coordinator; `values` are the settings, checked and complete.

    `host` and `other_hosts` are the addresses at which its peers may reach it. `grace_s` is how long it may take to
    leave after a notice, 0 if unknown. `checkpoint_store` is where checkpoints go if this machine does not see the
    run's directory. `upload_dir` is the local copy of the user's directory if this machine does not see that one:
    files saved below it are uploaded.
    """

    url: str
    token_file: str
    run: str
    member: str
    incarnation: str
    host: str
    settings: dict[str, Value]
    values: RunSettings
    run_dir: str
    role: str = "trainer"
    speed: float = 0.0
    grace_s: float = 0.0
    other_hosts: tuple[str, ...] = ()
    checkpoint_store: str = ""
    upload_dir: str = ""

    @property
    def access(self) -> CoordinatorAccess:
        return CoordinatorAccess(self.url, self.token_file)


def read(environ: Mapping[str, str]) -> MemberEnvironment | None:
    """Return this member's environment, or None if no agent started it: then it trains alone."""
    url = environ.get("SHOAL_URL")
    if not url:
        return None
    settings = _decode(environ.get("SHOAL_SETTINGS") or "{}")
    host, *other_hosts = _require(environ, "SHOAL_MEMBER_HOSTS").split(",")
    return MemberEnvironment(
        url=url,
        token_file=_require(environ, "SHOAL_TOKEN_FILE"),
        run=_require(environ, "SHOAL_RUN"),
        member=_require(environ, "SHOAL_MEMBER"),
        incarnation=_require(environ, "SHOAL_INCARNATION"),
        host=host,
        settings=settings,
        values=parse_settings(settings),
        run_dir=_require(environ, "SHOAL_RUN_DIR"),
        role=environ.get("SHOAL_ROLE") or "trainer",
        speed=_positive(environ.get("SHOAL_SPEED", "")),
        grace_s=_positive(environ.get("SHOAL_GRACE_S", "")),
        other_hosts=tuple(other_hosts),
        checkpoint_store=environ.get("SHOAL_STORE", ""),
        upload_dir=environ.get("SHOAL_APART", ""),
    )


def _decode(text: str) -> dict[str, Value]:
    try:
        return msgspec.json.decode(text, type=dict[str, Value])
    except msgspec.DecodeError as error:
        raise BadSettings("SHOAL_SETTINGS is not a JSON object of plain values", why=str(error)) from error


def _positive(text: str) -> float:
    """Return a positive number, or 0 if the text is not one: these variables are only estimates."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 < value < float("inf") else 0.0


def _require(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise IncompleteEnvironment(
            f"{name} is not set",
            why="SHOAL_URL is set, so an agent should have started this process with all variables",
            do="start it with shoal run, or unset SHOAL_URL to train alone",
        )
    return value
