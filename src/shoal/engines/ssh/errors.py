"""What can go wrong with a host: one error for each cause, with what was tried and the remedy; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.engines.ssh.command import OLDEST_AGENT, OLDEST_HELPER, SHIFTED, SshOptions, agent_python
from shoal.errors import AllocationRefused, EngineUnreachable, LaunchError

SSH_FAILED = 255
NOT_FOUND, NOT_RUNNABLE = 127, 126
SKEW_S = 2.0


@dataclass(eq=False)
class HostError(Exception):
    """A host that could not do what it was asked; `unsure` if it may have done it all the same."""

    error: LaunchError
    unsure: bool = False

    def __str__(self) -> str:
        return f"{self.error.what}: {self.error.why}" if self.error.why else self.error.what


@dataclass(frozen=True, slots=True)
class _SshErrorPattern:
    """What ssh says, and what that means. Before a session is open, nothing can have been done on the host."""

    said: str
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
        "check that it is switched on and that this machine may reach it",
        unsure=True,
    ),
    _SshErrorPattern(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key for .* has changed",
        AllocationRefused,
        "{host} shows another key than before",
        "find out why; if it was set up anew: ssh-keygen -R {name}, then call it once by hand: ssh {host}",
    ),
    _SshErrorPattern(
        r"Host key verification failed|No \S+ host key is known",
        AllocationRefused,
        "the key of {host} is not known here",
        "call it once by hand and compare its key: ssh {host}; or set accept_new = true in [pool.{pool}]",
    ),
    _SshErrorPattern(
        r"Permission denied|Too many authentication failures|No supported authentication methods",
        AllocationRefused,
        "{host} does not let us in",
        "ssh {host} must work without a question: add your key to ~/.ssh/authorized_keys there, load it into the "
        "agent (ssh-add), or name it as identity in [pool.{pool}]",
    ),
    _SshErrorPattern(
        r"Temporary failure in name resolution",
        EngineUnreachable,
        "the name {host} could not be looked up just now",
        "check the name server of this machine, or correct hosts in [pool.{pool}]",
    ),
    _SshErrorPattern(
        r"Could not resolve hostname",
        AllocationRefused,
        "there is no host {host}",
        "correct hosts in [pool.{pool}], or give {name} a HostName in ~/.ssh/config",
    ),
    _SshErrorPattern(
        r"Connection refused",
        EngineUnreachable,
        "{host} is there, but no sshd listens",
        "start sshd there, or correct port in [pool.{pool}]",
    ),
    _SshErrorPattern(
        r"(?i)connection timed out|operation timed out|no route to host|network is unreachable|host is down"
        r"|timed out during banner exchange|Connection timed out during",
        EngineUnreachable,
        "{host} does not answer",
        "check that it is switched on and that this machine may reach it",
    ),
    _SshErrorPattern(
        r"kex_exchange_identification|banner exchange|Connection closed by|Connection reset by",
        EngineUnreachable,
        "{host} hung up before we were in",
        "look at sshd's log there; if it limits new connections (MaxStartups), lower parallel in [pool.{pool}]",
        unsure=True,
    ),
    _SshErrorPattern(
        r"Bad configuration option|terminating, \d+ bad configuration|Can't open user config file|keyword .* extra"
        r"|Bad owner or permissions on|unix_listener: path .* too long|not accessible: No such file",
        AllocationRefused,
        "ssh cannot be used as it is configured here",
        "correct config or identity in [pool.{pool}], or ~/.ssh/config",
    ),
)


def of_ssh(pool: str, host: str, code: int, said: str) -> HostError:
    """What an ssh that brought no answer means."""
    line = _telling(said)
    names = {"pool": pool, "host": host, "name": re.sub(r"^(ssh://)?([^@]*@)?", "", host)}
    if code == SSH_FAILED:
        for cause in _CAUSES:
            if re.search(cause.said, said):
                return HostError(
                    cause.kind(cause.what.format(**names), where=_where(names), why=line, do=cause.do.format(**names)),
                    cause.unsure,
                )
        what = f"the connection to {host} ended before an answer"
        return HostError(EngineUnreachable(what, where=_where(names), why=line, do=f"try it by hand: ssh {host}"), True)
    if SHIFTED in said:
        oldest = ".".join(map(str, OLDEST_HELPER))
        return _unfit(names, f"the Python of {host} is too old", line, f"Shoal's helper there needs {oldest} or newer")
    if code in (NOT_FOUND, NOT_RUNNABLE):
        return _unfit(names, f"there is no such Python on {host}", line, "nothing was started")
    what = f"what Shoal asked {host} to do failed there with exit code {code}"
    return HostError(EngineUnreachable(what, where=_where(names), why=line, do=f"try it by hand: ssh {host}"), True)


def silent(pool: str, host: str, within_s: float) -> HostError:
    """A host to which there is a connection, or might have been, but no answer."""
    what, do = f"{host} does not answer", "check that it is switched on and that this machine may reach it"
    why = f"nothing came for {within_s:g} s"
    return HostError(EngineUnreachable(what, where=_where({"pool": pool, "host": host}), why=why, do=do), True)


def no_ssh(pool: str, why: str) -> HostError:
    """This machine cannot run ssh at all."""
    do = "install OpenSSH's client on the machine of the coordinator"
    return HostError(AllocationRefused("ssh cannot be started here", where=f"pool {pool}", why=why, do=do))


def of_answer(pool: str, host: str, options: SshOptions, answer: Mapping[str, Any]) -> HostError | None:
    """What a host could not do, if it says so."""
    if answer["state"] == "unfit":
        return _of_python(pool, host, options, answer)
    if answer["state"] != "failed":
        return None
    names = {"pool": pool, "host": host}
    path, why = answer["path"] or "its directory", f"{answer['why']}: {answer['path']}"
    what, do = {
        "ENOSPC": (f"no space is left on {host}", f"make room where {path} is, or give [pool.{pool}] a directory"),
        "EDQUOT": (f"the quota on {host} is used up", f"make room where {path} is, or give [pool.{pool}] a directory"),
        "ENOLCK": (
            f"files cannot be locked on {host}",
            f"give [pool.{pool}] a directory that is on a disk of the host itself",
        ),
        "ENOSYS": (f"{host} does not run Linux", f"take it out of [pool.{pool}]"),
    }.get(
        answer["errno"],
        (f"Shoal's directory on {host} cannot be written", f"give [pool.{pool}] a directory that can be"),
    )
    return HostError(AllocationRefused(what, where=_where(names), why=why, do=do))


def skew(now_there: float, asked_at: float, answered_at: float) -> str:
    """What is to be said of a host's clock, nothing if it is right as far as one can tell."""
    ahead_s, behind_s = now_there - answered_at, asked_at - now_there
    if ahead_s > SKEW_S:
        return f"its clock is {ahead_s:.0f} s ahead of this machine's: set it, or times and certificates go wrong"
    if behind_s > SKEW_S:
        return f"its clock is {behind_s:.0f} s behind this machine's: set it, or times and certificates go wrong"
    return ""


def _of_python(pool: str, host: str, options: SshOptions, answer: Mapping[str, Any]) -> HostError:
    names = {"pool": pool, "host": host}
    *before, last = answer["said"].split("\n")[-3:-1] or [""]
    version = before[-1] if before and last == "no shoal" else last
    python = agent_python(options)
    if last == "no shoal":
        return _unfit(names, f"Shoal is not installed on {host}", f"tried {python}", f"Python {version}")
    if answer["exit"] == 0 and re.fullmatch(r"[\d.]+\S*", version):
        oldest = ".".join(map(str, OLDEST_AGENT))
        return _unfit(
            names, f"the Python of {host} is too old", f"tried {python}: Python {version}", f"needed is {oldest}"
        )
    if answer["exit"] in (NOT_FOUND, NOT_RUNNABLE):
        return _unfit(names, f"there is no such Python on {host}", _telling(answer["erred"]), f"tried {python}")
    if answer["exit"] is None:
        return _unfit(names, f"the setup of {host} does not come to an end", answer["erred"], f"tried {python}")
    why = f"exit code {answer['exit']}, {_telling(answer['erred'] or answer['said'])}"
    return _unfit(names, f"Python cannot be started on {host}", why, f"tried {python}")


def _unfit(names: Mapping[str, str], what: str, why: str, more: str) -> HostError:
    do = (
        f'name one that has Shoal in [pool.{names["pool"]}]: python = "~/venv/bin/python"; '
        'or let it be installed there: environment = "requirements.txt"'
    )
    return HostError(AllocationRefused(what, where=_where(names), why=f"{why} ({more})", do=do))


def _where(names: Mapping[str, str]) -> str:
    return f"pool {names['pool']}, ssh {names['host']}"


def _telling(said: str) -> str:
    """The line of what ssh printed that says most: not the frame around a warning, and not the last goodbye."""
    lines = [line.strip("@ \t") for line in said.splitlines() if line.strip("@ \t")]
    telling = [line for line in lines if any(re.search(cause.said, line) for cause in _CAUSES)]
    return (telling or lines or ["it said nothing"])[0 if telling else -1][:300]
