"""Errors of ssh hosts: one error per cause, with what was tried and how to fix it; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.engines.ssh.command import OLDEST_AGENT, OLDEST_HELPER, PYTHON_TOO_OLD, SshOptions, agent_python
from shoal.errors import AllocationRefused, EngineUnreachable, LaunchError

SSH_FAILED = 255
NOT_FOUND, NOT_RUNNABLE = 127, 126
SKEW_S = 2.0


@dataclass(eq=False)
class HostError(Exception):
    """Call to a host that failed; `unsure` if the host may have carried it out all the same."""

    error: LaunchError
    unsure: bool = False

    def __str__(self) -> str:
        return f"{self.error.what}: {self.error.why}" if self.error.why else self.error.what


@dataclass(frozen=True, slots=True)
class _SshErrorPattern:
    """Output of ssh and what it means. Before a session is open, nothing can have been done on the host."""

    pattern: str
    kind: type[LaunchError]
    what: str
    do: str
    unsure: bool = False


_CAUSES = (
    _SshErrorPattern(
        r"Read from remote host|client_loop|ssh_dispatch_run_fatal|Broken pipe|not responding|mux_client"
        r"|Connection to .* closed",
        EngineUnreachable,
        "the connection to {host} broke",
        "check that it is up and that this machine can reach it",
        unsure=True,
    ),
    _SshErrorPattern(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key for .* has changed",
        AllocationRefused,
        "the host key of {host} has changed",
        "find out why; if it was reinstalled: ssh-keygen -R {name}, then connect once by hand: ssh {host}",
    ),
    _SshErrorPattern(
        r"Host key verification failed|No \S+ host key is known",
        AllocationRefused,
        "the host key of {host} is unknown",
        "connect once by hand and compare the key: ssh {host}; or set accept_new = true in [pool.{pool}]",
    ),
    _SshErrorPattern(
        r"Permission denied|Too many authentication failures|No supported authentication methods",
        AllocationRefused,
        "authentication failed on {host}",
        "ssh {host} must work without a prompt: add your key to ~/.ssh/authorized_keys there, load it into the "
        "agent (ssh-add), or name it as identity in [pool.{pool}]",
    ),
    _SshErrorPattern(
        r"Temporary failure in name resolution",
        EngineUnreachable,
        "temporary failure to resolve {host}",
        "check the name server of this machine, or correct hosts in [pool.{pool}]",
    ),
    _SshErrorPattern(
        r"Could not resolve hostname",
        AllocationRefused,
        "unknown host {host}",
        "correct hosts in [pool.{pool}], or give {name} a HostName in ~/.ssh/config",
    ),
    _SshErrorPattern(
        r"Connection refused",
        EngineUnreachable,
        "{host} refused the connection: no sshd is listening",
        "start sshd there, or correct port in [pool.{pool}]",
    ),
    _SshErrorPattern(
        r"(?i)connection timed out|operation timed out|no route to host|network is unreachable|host is down"
        r"|timed out during banner exchange|Connection timed out during",
        EngineUnreachable,
        "{host} does not answer",
        "check that it is up and that this machine can reach it",
    ),
    _SshErrorPattern(
        r"kex_exchange_identification|banner exchange|Connection closed by|Connection reset by",
        EngineUnreachable,
        "{host} closed the connection during login",
        "look at sshd's log there; if it limits new connections (MaxStartups), lower parallel in [pool.{pool}]",
        unsure=True,
    ),
    _SshErrorPattern(
        r"Bad configuration option|terminating, \d+ bad configuration|Can't open user config file|keyword .* extra"
        r"|Bad owner or permissions on|unix_listener: path .* too long|not accessible: No such file",
        AllocationRefused,
        "ssh is misconfigured on this machine",
        "correct config or identity in [pool.{pool}], or ~/.ssh/config",
    ),
)


def of_ssh(pool: str, host: str, code: int, output: str) -> HostError:
    """Return the error of an ssh command that brought no reply; `output` is its standard error."""
    line = _relevant_line(output)
    names = {"pool": pool, "host": host, "name": re.sub(r"^(ssh://)?([^@]*@)?", "", host)}
    if code == SSH_FAILED:
        for cause in _CAUSES:
            if re.search(cause.pattern, output):
                return HostError(
                    cause.kind(cause.what.format(**names), where=_where(names), why=line, do=cause.do.format(**names)),
                    cause.unsure,
                )
        what = f"the connection to {host} ended without a reply"
        return HostError(EngineUnreachable(what, where=_where(names), why=line, do=f"try by hand: ssh {host}"), True)
    if PYTHON_TOO_OLD in output:
        oldest = ".".join(map(str, OLDEST_HELPER))
        return _unfit(names, f"Python on {host} is too old", line, f"Shoal's remote helper needs {oldest} or newer")
    if code in (NOT_FOUND, NOT_RUNNABLE):
        return _unfit(names, f"Python not found on {host}", line, "nothing was started")
    what = f"Shoal's remote helper failed on {host} with exit code {code}"
    return HostError(EngineUnreachable(what, where=_where(names), why=line, do=f"try by hand: ssh {host}"), True)


def silent(pool: str, host: str, within_s: float) -> HostError:
    """Return the error of a host that did not reply in time; a connection may or may not have existed."""
    what, do = f"{host} does not answer", "check that it is up and that this machine can reach it"
    why = f"no reply within {within_s:g} s"
    return HostError(EngineUnreachable(what, where=_where({"pool": pool, "host": host}), why=why, do=do), True)


def no_ssh(pool: str, why: str) -> HostError:
    """Return the error of a machine without a working ssh command."""
    do = "install the OpenSSH client on the coordinator's machine"
    return HostError(AllocationRefused("cannot run ssh on this machine", where=f"pool {pool}", why=why, do=do))


def of_reply(pool: str, host: str, options: SshOptions, reply: Mapping[str, Any]) -> HostError | None:
    """Return the error that a helper's reply reports; None if it succeeded."""
    if reply["state"] == "unfit":
        return _of_python(pool, host, options, reply)
    if reply["state"] != "failed":
        return None
    names = {"pool": pool, "host": host}
    path, why = reply["path"] or "its directory", f"{reply['why']}: {reply['path']}"
    what, do = {
        "ENOSPC": (f"no space left on {host}", f"free space around {path}, or set directory in [pool.{pool}]"),
        "EDQUOT": (f"disk quota exceeded on {host}", f"free space around {path}, or set directory in [pool.{pool}]"),
        "ENOLCK": (
            f"files cannot be locked on {host}",
            f"set directory in [pool.{pool}] to one on a local disk of the host",
        ),
        "ENOSYS": (f"{host} does not run Linux", f"remove it from [pool.{pool}]"),
    }.get(
        reply["errno"],
        (f"cannot write to Shoal's directory on {host}", f"set directory in [pool.{pool}] to a writable one"),
    )
    return HostError(AllocationRefused(what, where=_where(names), why=why, do=do))


def skew(remote_now: float, sent_at: float, received_at: float) -> str:
    """Return a sentence about a host's clock; "" if it is right as far as one call can tell."""
    ahead_s, behind_s = remote_now - received_at, sent_at - remote_now
    if ahead_s > SKEW_S:
        return f"its clock is {ahead_s:.0f} s ahead of this machine's: set it, or times and certificates go wrong"
    if behind_s > SKEW_S:
        return f"its clock is {behind_s:.0f} s behind this machine's: set it, or times and certificates go wrong"
    return ""


def _of_python(pool: str, host: str, options: SshOptions, reply: Mapping[str, Any]) -> HostError:
    """Return the error of a host whose Python cannot run an agent, from the output of `command.check`."""
    names = {"pool": pool, "host": host}
    *before, last = reply["output"].split("\n")[-3:-1] or [""]
    version = before[-1] if before and last == "no shoal" else last
    python = agent_python(options)
    if last == "no shoal":
        return _unfit(names, f"Shoal is not installed on {host}", f"tried {python}", f"Python {version}")
    if reply["exit"] == 0 and re.fullmatch(r"[\d.]+\S*", version):
        oldest = ".".join(map(str, OLDEST_AGENT))
        tried = f"tried {python}: Python {version}"
        return _unfit(names, f"Python on {host} is too old", tried, f"need {oldest} or newer")
    if reply["exit"] in (NOT_FOUND, NOT_RUNNABLE):
        return _unfit(names, f"Python not found on {host}", _relevant_line(reply["errors"]), f"tried {python}")
    if reply["exit"] is None:
        return _unfit(names, f"the setup of {host} did not finish in time", reply["errors"], f"tried {python}")
    why = f"exit code {reply['exit']}, {_relevant_line(reply['errors'] or reply['output'])}"
    return _unfit(names, f"cannot start Python on {host}", why, f"tried {python}")


def _unfit(names: Mapping[str, str], what: str, why: str, more: str) -> HostError:
    do = (
        f'set one that has Shoal in [pool.{names["pool"]}]: python = "~/venv/bin/python"; '
        'or have it installed there: environment = "requirements.txt"'
    )
    return HostError(AllocationRefused(what, where=_where(names), why=f"{why} ({more})", do=do))


def _where(names: Mapping[str, str]) -> str:
    return f"pool {names['pool']}, ssh {names['host']}"


def _relevant_line(output: str) -> str:
    """Return the line of ssh's output that tells the cause: not the frame around a warning, nor a farewell."""
    lines = [line.strip("@ \t") for line in output.splitlines() if line.strip("@ \t")]
    causes = [line for line in lines if any(re.search(cause.pattern, line) for cause in _CAUSES)]
    return (causes or lines or ["it printed nothing"])[0 if causes else -1][:300]
