"""Command lines of the ssh engine: how a host is called, and which host a hire goes to first; pure."""

from __future__ import annotations

import math
import re
import shlex
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.engines import agent_script
from shoal.engines.engine import AllocationRequest, EngineOptions
from shoal.errors import BadPool

OLDEST_HELPER = (3, 7)
OLDEST_AGENT = (3, 11)
ALIVE_S, ALIVE_COUNT = 5, 2
PERSIST_S = 60
GRACE_S = 30.0
SHIFTED = "shoal needs a newer Python here than"


class SshOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a pool of ssh hosts can be told; all else comes from the user's own ssh configuration and agent.

    `hosts`: each `host`, `user@host`, `ssh://user@host:port` or an alias, with `*4` behind it for four hires on it.
    `per_host`: how many hires run on a host that does not say so itself. `port`, `identity` (a key file), `config`
    (instead of ~/.ssh/config) and `jump` (a host in between, which may have its own in the configuration) are for all
    hosts. `accept_new` notes the key of a host that was never seen; one that changed is refused all the same.
    `connect_timeout_s` bounds the wait for a host, `parallel` how many are called at once. A host that was silent for
    `lost_after_s` is taken as lost, with all that ran there, until it answers again.
    """

    hosts: tuple[str, ...] = ()
    per_host: int = 1
    port: int = 0
    identity: str = ""
    config: str = ""
    jump: str = ""
    accept_new: bool = False
    connect_timeout_s: float = 10.0
    lost_after_s: float = 60.0
    parallel: int = 8


@dataclass(frozen=True, slots=True)
class SshHost:
    """A host, as ssh is told it, and how many hires may be on it."""

    host: str
    room: int


def places(pool: str, options: SshOptions) -> tuple[SshHost, ...]:
    """The hosts of a pool, in their order; whatever ssh would take for something else is refused."""
    found: dict[str, SshHost] = {}
    for text in options.hosts:
        match = re.fullmatch(r"([^\s*/-][^\s*]*?)(?:\*([1-9]\d*))?", text)
        if match is None:
            raise _bad(pool, f"{text!r} is not a host", 'write hosts like "gpu1", "me@gpu2" or "gpu3*2"')
        host = match[1]
        if host in found:
            raise _bad(pool, f"{host} is named twice", f'write "{host}*2" for two hires on it')
        found[host] = SshHost(host, int(match[2]) if match[2] else options.per_host)
    if not found:
        raise _bad(pool, "it names no hosts", 'give it hosts = ["gpu1", "gpu2"]')
    if options.per_host < 1 or options.parallel < 1 or options.connect_timeout_s <= 0 or options.lost_after_s < 0:
        raise _bad(pool, "a number is too small", "per_host, parallel and connect_timeout_s are at least 1")
    if options.jump.startswith("-") or len(options.jump.split()) > 1:
        raise _bad(pool, f"{options.jump!r} is not a host to jump over", 'write jump = "me@gateway"')
    return tuple(found.values())


def order(among: tuple[SshHost, ...], hire: str) -> tuple[SshHost, ...]:
    """The hosts in the order in which a hire tries them: by its number, so that all who submit it begin with the same.

    Hires that follow each other begin with different hosts.
    """
    number = re.search(r"\d+$", hire)
    first = (int(number[0]) - 1 if number else zlib.crc32(hire.encode())) % len(among)
    return (*among[first:], *among[:first])


def handle(host: str, tag: str, hire: str) -> str:
    return f"{host}/{tag}/{hire}"


def of_handle(text: str) -> tuple[str, str, str]:
    """Host, tag and hire."""
    host, tag, hire = text.rsplit("/", 2)
    return host, tag, hire


def argv(options: SshOptions, host: str, control: str) -> tuple[str, ...]:
    """How a host is called: the program that it runs comes on stdin, and what that is asked to do after it."""
    via: tuple[str, ...] = ()
    if options.jump:
        jump = shlex.join(("ssh", *_ssh(options, control, port=0), "--", options.jump)).replace("%", "%%")
        via = ("-o", f"ProxyCommand={jump.replace('ssh ', 'ssh -W [%h]:%p ', 1)}")
    return ("ssh", *_ssh(options, control, options.port), *via, "--", host, helper(options))


def leave_argv(options: SshOptions, host: str, control: str) -> tuple[str, ...]:
    """End the connection that calls to a host share."""
    return ("ssh", *_ssh(options, control, 0 if host == options.jump else options.port), "-O", "exit", "--", host)


def _ssh(options: SshOptions, control: str, port: int) -> Iterable[str]:
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": f"{math.ceil(options.connect_timeout_s)}",
        "ConnectionAttempts": "1",
        "ServerAliveInterval": f"{ALIVE_S}",
        "ServerAliveCountMax": f"{ALIVE_COUNT}",
        "ControlMaster": "auto",
        "ControlPath": f"{control}/%C",
        "ControlPersist": f"{PERSIST_S}",
        # A user's own settings for sessions in a terminal would stand in the way.
        "RequestTTY": "no",
        "RemoteCommand": "none",
        "ClearAllForwardings": "yes",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "LogLevel": "ERROR",
    }
    if options.accept_new:
        settings["StrictHostKeyChecking"] = "accept-new"
    yield from ("-F", options.config) if options.config else ()
    yield from ("-i", options.identity, "-o", "IdentitiesOnly=yes") if options.identity else ()
    yield from ("-p", str(port)) if port else ()
    for name, value in settings.items():
        yield from ("-o", f"{name}={value}")


def helper(options: SshOptions) -> str:
    """The command on the host: it has to mean the same to any login shell, so it is one line without $, ! or `.

    Shell lines that the pool wants first may take long, so the helper does without them and uses the host's own Python.
    """
    python = agent_script.quoted(options.python) if options.python and not options.setup else "python3"
    major, minor = OLDEST_HELPER
    too_old = f"sys.version_info < ({major}, {minor}) and sys.exit('{SHIFTED} ' + sys.version.split()[0])"
    return f'{python} -c "import json, sys; {too_old}; exec(json.loads(sys.stdin.readline()))"'


def script(request: AllocationRequest, options: SshOptions) -> str:
    """What becomes the agent on the host."""
    return agent_script.script(request, options, python=agent_python(options))


def check(options: SshOptions) -> str:
    """Shell that ends with the word "fit" if an agent could run there; it says first which Python there is."""
    major, minor = OLDEST_AGENT if not options.environment else OLDEST_HELPER
    shoal = 'import importlib.util as u; print("fit" if u.find_spec("shoal") else "no shoal")'
    last = 'print("fit")' if options.environment else shoal
    look = f"import sys; print(sys.version.split()[0]); sys.version_info >= ({major}, {minor}) or sys.exit(0); {last}"
    run = f"exec {agent_script.quoted(agent_python(options))} -c {shlex.quote(look)}"
    return "\n".join(["set -e", *options.setup, run]) + "\n"


def agent_python(options: SshOptions) -> str:
    """The one that runs here, where hosts see this disk; otherwise whatever they have."""
    return options.python or (sys.executable if options.shared else "python3")


def _bad(pool: str, why: str, do: str) -> BadPool:
    return BadPool(f"the hosts of pool {pool} cannot be used", where=f"[pool.{pool}]", why=why, do=do)
