"""HTTP requests of strangers, users and owners, as they should be and as they should not.

Requests with a valid token are carried out: they submit runs with odd settings and stop, scale, resume and read them.
The run that must train on is read, and scaled to what it has. Submitted runs are few and small, and their script does
not exist, so that the machine is kept busy by messages and not by processes.
"""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import quote

import msgspec

from shoal.core.runs import admission
from shoal.errors import ShoalError
from shoal.settings import RunSettings, parse_settings
from shoal.testing.fuzz.odd_values import ODD_INTEGERS, ODD_TEXTS, OddValues, to_json, type_info
from shoal.wire import api, limits
from shoal.wire.machine_check import CheckRequest

MAX_RUNS = 40
RUN_NAMES = ("elsewhere", "%00", "x" * 500, "..%2f..")
FILE_NAMES = ("outputs/a", "outputs/b/c", "outputs/" + "x" * 300, "..%2f..%2ftoken", "checkpoints/fuzz", "%00", "")
SETTINGS = tuple(field.encode_name for field in msgspec.structs.fields(RunSettings))
Request = tuple[str, str, bytes]


class ApiRequests:
    """Makes requests to the coordinator of `run`, which has these members at least and at most."""

    def __init__(self, odd: OddValues, run: str, members: tuple[int, int], agents: list[str]) -> None:
        self._odd, self._dice, self._run = odd, odd.dice, run
        self._members, self._agents = members, agents
        self._submitted = 0
        self._makers = (
            self._read,
            self._read,
            self._file,
            self._blob,
            self._submit,
            self._change,
            self._change,
            self._rest,
        )

    def any(self) -> Request:
        """Return method, path and body of a request of some kind."""
        return self._dice.choice(self._makers)()

    def _some_run(self) -> str:
        return self._dice.choice((self._run, self._run, self._victim(), *RUN_NAMES))

    def _victim(self) -> str:
        return f"victim{self._dice.randrange(max(1, self._submitted))}"

    def _number(self) -> str:
        return str(self._dice.choice((*ODD_INTEGERS, 10**400, "x", "%ff", "")))

    def _text(self) -> str:
        return quote(self._dice.choice(ODD_TEXTS)[:2000])

    def _read(self) -> Request:
        run, dice = self._some_run(), self._dice
        path = dice.choice(
            (
                "/v1/runs",
                f"/v1/runs/{run}",
                f"/v1/runs/{run}/story?limit={self._number()}&after={self._number()}",
                f"/v1/runs/{run}/story?member={self._text()}&limit=5",
                f"/v1/runs/{run}/logs?after={self._number()}&member=local/0&limit=20",
                f"/v1/runs/{run}/logs?after={self._number()}&limit={self._number()}&member={self._text()}",
                "/metrics",
                "/v1/agents",
                "/v1/pools",
                "/v1/health",
            )
        )
        return "GET", path, self._any_body() if dice.random() < 0.2 else b""

    def _file(self) -> Request:
        dice, run, name = self._dice, self._some_run(), self._dice.choice(FILE_NAMES)
        files = f"/v1/runs/{run}/files"
        body, upload = self._odd.noise(300), dice.choice(("0" * 16, "f" * 16, "..", "", "x" * 300))
        digest = hashlib.sha256(body).hexdigest()
        match dice.randrange(6):
            case 0:
                return "GET", f"{files}?folder={dice.choice(('outputs', 'checkpoints', self._text()))}", b""
            case 1:
                return "GET", f"{files}/{name}", b""
            case 2:
                return "DELETE", f"{files}/{name}" + dice.choice(("", f"?upload={upload}")), b""
            case 3:
                return "PUT", f"{files}/{name}?upload={upload}&offset=0&size={len(body)}&digest={digest}", body
            case 4:
                odd = f"offset={self._number()}&size={self._number()}&digest={self._text()}"
                return "PUT", f"{files}/{name}?upload={upload}&{odd}", body
            case _:
                return "PUT", f"{files}/{name}?upload={upload}&offset={self._number()}", body

    def _blob(self) -> Request:
        dice, body = self._dice, bytes((self._dice.randrange(20),)) * 30
        digest = dice.choice((hashlib.sha256(body).hexdigest(), "0" * 64, "x", "..%2f..%2ftoken", "%00"))
        return dice.choice(
            (
                ("PUT", f"/v1/blobs/{digest}", body),
                ("GET", f"/v1/blobs/{digest}", b""),
                ("POST", "/v1/blobs", to_json([digest, *dice.sample(ODD_TEXTS, 2)])),
                ("POST", "/v1/blobs", self._any_body()),
            )
        )

    def _submit(self) -> Request:
        if self._dice.random() < 0.3:
            return "POST", "/v1/runs", self._body(api.SubmitRequest)
        fields = self._spec()
        if self._would_start(fields):
            if self._submitted >= MAX_RUNS:
                fields["surplus"] = 1
            self._submitted += 1
        return "POST", "/v1/runs", to_json(fields)

    def _spec(self) -> dict[str, Any]:
        """Return a run to submit of which some fields and settings are odd."""
        odd, dice, info = self._odd, self._dice, type_info(api.SubmitRequest)
        name = f"victim{self._submitted}"
        fields: dict[str, Any] = {"name": name, "argv": ["none.py"], "cwd": "/nonexistent", "members": [1, 2]}
        for field in dice.sample(info.fields, dice.randrange(3)):  # type: ignore[attr-defined]
            fields[field.encode_name] = odd.value(field.type, within=dice.random() < 0.7)
        settings = {
            name: odd.value(type_info(limits.SettingValue)) for name in dice.sample(SETTINGS, dice.randrange(3))
        }
        if isinstance(fields.get("settings", {}), dict):
            fields["settings"] = {**fields.get("settings", {}), **settings}
        return fields

    def _would_start(self, fields: dict[str, Any]) -> bool:
        """Return whether the coordinator may accept a run; if so, make it small."""
        try:
            request = msgspec.json.decode(to_json(fields), type=api.SubmitRequest)
            admission.check_members(*request.members)
            parse_settings(request.settings)
        except (ShoalError, msgspec.DecodeError, UnicodeError):
            return False
        fields["members"] = [1, 2]
        few = {"restarts.user": 0, "restarts.infrastructure": 0, "servers": 2}
        fields["settings"] = {**fields["settings"], **few}
        return True

    def _change(self) -> Request:
        dice = self._dice
        run, own = dice.choice(((self._victim(), False), (self._victim(), False), (self._run, True)))
        if own or dice.random() < 0.5:
            return "POST", f"/v1/runs/{run}/{'scale' if own else dice.choice(('scale', 'resume'))}", self._scale(own)
        return "POST", f"/v1/runs/{run}/{dice.choice(('stop', 'stop', 'resume'))}", self._stop()

    def _scale(self, own: bool) -> bytes:
        low, high = self._members if own else (1, 2)
        if self._dice.random() < 0.3:
            return to_json({"min": low, "max": high, "budget": self._dice.choice((None, -1.0, 0.0, 1e300))})
        fields: dict[str, Any] = self._odd.of(api.ScaleRequest, within=self._dice.random() < 0.5)
        if all(isinstance(fields[name], int) and 1 <= fields[name] <= 1 << 20 for name in ("min", "max")):
            fields["max"] = 0
        return to_json(fields)

    def _stop(self) -> bytes:
        return to_json(self._odd.of(api.StopRequest, within=self._dice.random() < 0.7))

    def _rest(self) -> Request:
        dice = self._dice
        # A real check takes its agent a second.
        agent = dice.choice((*("fuzz", "%00") * 8, *self._agents))
        # Without a peer, an agent only describes its machine; the doctor's port listens at any of these settings.
        check: dict[str, Any] = self._odd.of(CheckRequest, within=True) | {"peer": "", "addresses": []}
        return dice.choice(
            (
                ("POST", "/v1/allocations/elsewhere", to_json(self._odd.of(api.SetupReport, within=True))),
                ("POST", f"/v1/agents/{agent}/examine", to_json(check)),
                ("POST", "/v1/agents/fuzz/examine", self._body(CheckRequest)),
                ("POST", f"/v1/runs/{dice.choice(RUN_NAMES)}/stop", self._body(api.StopRequest)),
                ("DELETE", f"/v1/runs/{self._some_run()}", self._any_body()),
                (dice.choice(("PATCH", "HEAD", "OPTIONS", "TRACE")), "/v1/runs", b""),
                ("GET", f"/{self._text()}", b""),
            )
        )

    def _any_body(self) -> bytes:
        return self._dice.choice((b"", b'"\xff\xff"', b"[" * 5000, b"null", self._odd.noise()))

    def _body(self, kind: Any) -> bytes:
        """Return a body of this type that is never quite right, so that no request is carried out."""
        body = to_json(self._odd.of(kind) | {"surplus": 1})
        return self._odd.damaged(body) if self._dice.random() < 0.3 else body
