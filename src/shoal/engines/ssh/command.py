"""Command lines of the ssh engine: how a host is called, and which host an allocation tries first; pure."""

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
# What no host name contains, and what a shell would obey: ssh hands host names on to commands of its configuration.
UNSAFE = re.compile(r"""[\x00-\x20\x7f$`'"\\;&|<>(){}]""")
# Printed by a host whose Python cannot even run the helper.
PYTHON_TOO_OLD = "shoal needs a newer Python here than"


class SshOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a pool of ssh hosts; all else comes from the user's own ssh configuration and agent.

    `hosts`: each `host`, `user@host`, `ssh://user@host:port` or an alias; `*4` behind it allows four allocations on it.
    `per_host`: allocations on a host without `*N`. `port`, `identity` (a key file), `config` (instead of ~/.ssh/config)
    and `jump` (a host to connect through) apply to all hosts. `accept_new` stores the key of a host that was never seen
    before; a changed key is rejected all the same. `connect_timeout_s` limits the wait for a connection, `parallel` how
    many hosts are called at a time. A host that is silent for `lost_after_s` counts as lost, with all that ran on it,
    until it answers again.
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
    """Host as it is passed to ssh; `room` is how many allocations it takes."""

    host: str
    room: int


def hosts(pool: str, options: SshOptions) -> tuple[SshHost, ...]:
    """Return the hosts of a pool, in order; raise `BadPool` for text that ssh would not take as a host."""
    hosts: dict[str, SshHost] = {}
    for text in options.hosts:
        match = re.fullmatch(r"([^\s*/-][^\s*]*?)(?:\*([1-9]\d*))?", text)
        if match is None or UNSAFE.search(text):
            raise _bad(pool, f"{text!r} is not a host", 'write hosts as "gpu1", "me@gpu2" or "gpu3*2"')
        host = match[1]
        if host in hosts:
            raise _bad(pool, f"{host} is listed twice", f'write "{host}*2" for two allocations on it')
        hosts[host] = SshHost(host, int(match[2]) if match[2] else options.per_host)
    if not hosts:
        raise _bad(pool, "it lists no hosts", 'set hosts = ["gpu1", "gpu2"]')
    if options.per_host < 1 or options.parallel < 1 or options.connect_timeout_s <= 0 or options.lost_after_s < 0:
        raise _bad(pool, "a number is too small", "per_host, parallel and connect_timeout_s must be at least 1")
    if options.jump.startswith("-") or len(options.jump.split()) > 1 or UNSAFE.search(options.jump):
        raise _bad(pool, f"{options.jump!r} is not a host to jump through", 'write jump = "me@gateway"')
    return tuple(hosts.values())


def order(hosts: tuple[SshHost, ...], allocation: str) -> tuple[SshHost, ...]:
    """Return the hosts in the order in which an allocation tries them.

    The order follows from the number in its name: every attempt begins with the same host, and consecutive allocations
    begin with different ones.
    """
    number = re.search(r"\d+$", allocation)
    first = (int(number[0]) - 1 if number else zlib.crc32(allocation.encode())) % len(hosts)
    return (*hosts[first:], *hosts[:first])


def handle(host: str, tag: str, allocation: str) -> str:
    return f"{host}/{tag}/{allocation}"


def of_handle(text: str) -> tuple[str, str, str]:
    """Return host, tag and name of an allocation."""
    host, tag, allocation = text.rsplit("/", 2)
    return host, tag, allocation


def argv(options: SshOptions, host: str, control: str) -> tuple[str, ...]:
    """Return the ssh command for one call; its standard input is the helper's source, then the request."""
    via: tuple[str, ...] = ()
    if options.jump:
        jump = shlex.join(("ssh", *_ssh(options, control, port=0), "--", options.jump)).replace("%", "%%")
        via = ("-o", f"ProxyCommand={jump.replace('ssh ', 'ssh -W [%h]:%p ', 1)}")
    return ("ssh", *_ssh(options, control, options.port), *via, "--", host, helper(options))


def disconnect_argv(options: SshOptions, host: str, control: str) -> tuple[str, ...]:
    """Return the command that closes the shared connection to a host."""
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
        # Settings that users make for their own interactive sessions would break ours.
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
    """Return the command that runs the helper on the host: one line that means the same to every login shell.

    So it has no $, ! or `. It does not run the pool's setup lines, which may take long, and uses the host's own Python.
    """
    python = agent_script.quoted(options.python) if options.python and not options.setup else "python3"
    major, minor = OLDEST_HELPER
    too_old = f"sys.version_info < ({major}, {minor}) and sys.exit('{PYTHON_TOO_OLD} ' + sys.version.split()[0])"
    return f'{python} -c "import json, sys; {too_old}; exec(json.loads(sys.stdin.readline()))"'


def script(request: AllocationRequest, options: SshOptions) -> str:
    """Return the shell script that becomes the agent on the host."""
    return agent_script.script(request, options, python=agent_python(options))


def check(options: SshOptions) -> str:
    """Return a shell script that prints the Python version, then "fit" if an agent could run there."""
    major, minor = OLDEST_AGENT if not options.environment else OLDEST_HELPER
    shoal = 'import importlib.util as u; print("fit" if u.find_spec("shoal") else "no shoal")'
    verdict = 'print("fit")' if options.environment else shoal
    probe = (
        f"import sys; print(sys.version.split()[0]); sys.version_info >= ({major}, {minor}) or sys.exit(0); {verdict}"
    )
    run = f"exec {agent_script.quoted(agent_python(options))} -c {shlex.quote(probe)}"
    return "\n".join(["set -e", *options.setup, run]) + "\n"


def agent_python(options: SshOptions) -> str:
    """Return the interpreter for agents: by default our own where the disk is shared, else the host's `python3`."""
    return options.python or (sys.executable if options.shared else "python3")


def _bad(pool: str, why: str, do: str) -> BadPool:
    return BadPool(f"invalid hosts in pool {pool}", where=f"[pool.{pool}]", why=why, do=do)
