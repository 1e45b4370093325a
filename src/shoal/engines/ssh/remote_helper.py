"""Remote helper: the program that the ssh engine runs on a host for every call.

Nothing has to be installed on a host but Python 3.7 or newer on Linux: the helper's modules travel as source on
standard input (`helper_source`), followed by one request as JSON. The reply is the one line of output that begins with
`REPLY_MARK`; whatever else a login shell prints is ignored. Every reply carries the host's clock, `now`, in seconds.

Requests (`do`) and the states that they are answered with:

=========  =====================================================  ==================================================
`list`     which allocations of a tag are here, and what the      `listed`
           machine has
`check`    could an agent run here                                `fit`, or `unfit` with the check's output
`start`    start an agent                                         `started`, `full`, or `late`
`cancel`   stop an agent                                          `stopped`, or `alive` with the pids that are left
`clean_up` remove directories of agents that ended long ago       `cleaned`
any        the operating system refused something                 `failed` with errno and path
=========  =====================================================  ==================================================

A host keeps no daemon, so all it knows is on disk and in /proc. What identifies a process is its pid and start time, on
one node and between two boots (`process_tree`); each allocation's directory records them (`allocation_dir`). The agent
writes that record itself, in the forked child, before it becomes the agent: so there is never an agent without a
record, whichever process dies when.

Calls may overlap, and a call may outlive its connection: SIGHUP is ignored, and whatever was begun is finished.

- *start* holds the node's lock, so that an allocation is started once however often it is requested, and `room` is not
  exceeded by two coordinators at a time. A request that was held up on the way, past `start_by`, starts nothing: the
  engine has started the allocation elsewhere by then.
- *cancel* sends SIGTERM once: agents take a second one as "stop now", which would cut the grace period short. The file
  `stopping` records when the first was sent, and later calls wait for the same deadline. Then everything is killed that
  descends from the agent, is in its session, or carries its mark in the environment.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from shoal.engines import process_tree
from shoal.engines.ssh import allocation_dir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Any, TypedDict

    from shoal.engines.process_tree import ProcessId
    from shoal.engines.ssh.allocation_dir import ProcessRecord

    Reply = dict[str, Any]

    class _HelperRequest(TypedDict):
        """Part of every request: the pool's directory, "" for the default."""

        directory: str

    class ListRequest(_HelperRequest):
        tag: str
        gpus: bool

    class CheckRunRequest(_HelperRequest):
        check: str

    class StartRequest(_HelperRequest):
        """Start an agent by running `script`, if fewer than `room` run here and the clock is not past `start_by`."""

        tag: str
        allocation: str
        room: int
        script: str
        credentials: str
        grace_s: float
        start_by: float

    class CancelRequest(_HelperRequest):
        tag: str
        allocation: str

    class CleanUpRequest(_HelperRequest):
        """Remove directories untouched for `keep_s`, but for those of the `active` allocations of this tag."""

        tag: str
        active: list[str]
        keep_s: float

    class RemoteAllocation(TypedDict):
        """Allocation in the reply to `list`; `log` is the end of its log once it has ended."""

        allocation: str
        alive: bool
        process: list[int] | None
        log: str


REPLY_MARK = "shoal-reply "
CHECK_S = 60.0
TREE_EVERY_S = 0.25
MARGIN_S = 3.0
TAIL_BYTES = 2000
REPORT_ENDED_S = 3600.0
_EXEC_FAILED = 71


def main() -> None:
    """Read a request from standard input, carry it out, and print the reply."""
    # The connection may end before we do: what was begun is finished.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request = json.loads(sys.stdin.read())
    handlers: dict[str, Callable[[Any], Reply]] = {
        "list": list_allocations,
        "check": check,
        "start": start,
        "cancel": cancel,
        "clean_up": clean_up,
    }
    try:
        if not os.path.exists("/proc/self/stat"):
            raise OSError(errno.ENOSYS, "there is no /proc", "/proc")
        reply = handlers[request["do"]](request)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        reply = {"state": "failed", "errno": name, "path": str(error.filename or ""), "why": error.strerror or ""}
    reply["now"] = time.time()
    sys.stdout.write(REPLY_MARK + json.dumps(reply) + "\n")


# --- requests


def list_allocations(request: ListRequest) -> Reply:
    """Return the allocations of a tag, how many of other tags run here, and what this machine has.

    Allocations that ended more than an hour ago are left out.
    """
    root = allocation_dir.root(request["directory"])
    own: list[RemoteAllocation] = []
    others = 0
    for tag, allocation, home in allocation_dir.homes(root):
        process = allocation_dir.record(home)
        if process is None or process["node"] != process_tree.node_name():
            continue
        alive = allocation_dir.is_alive(process)
        if tag == request["tag"] and (alive or allocation_dir.report_age_s(home) < REPORT_ENDED_S):
            log = "" if alive else _end_of_log(home, process)
            identity = [process["pid"], process["started"]]
            own.append({"allocation": allocation, "alive": alive, "process": identity, "log": log})
        elif tag != request["tag"]:
            others += alive
        if not alive:
            allocation_dir.remove_unused_token(home)
    reply = {"state": "listed", "allocations": own, "others": others, **_machine(root)}
    if request.get("gpus"):
        reply["gpus"] = _gpus()
    return reply


def check(request: CheckRunRequest) -> Reply:
    """Run a shell script that prints "fit" if an agent could run here; kill whatever it leaves behind."""
    process_tree.adopt_orphans()
    # Files, not pipes: what a pool's setup leaves in the background would keep a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            code: int | None = subprocess.call(
                ["sh", "-c", request["check"]], stdin=subprocess.DEVNULL, stdout=output, stderr=errors, timeout=CHECK_S
            )
        except subprocess.TimeoutExpired:
            code = None
        own = process_tree.identify(os.getpid())
        process_tree.kill(process_tree.tree({own}) - {own})
        texts = [_tail(output), _tail(errors)]
    if code == 0 and texts[0].strip().endswith("fit"):
        return {"state": "fit"}
    return {"state": "unfit", "exit": code, "output": texts[0], "errors": texts[1]}


def start(request: StartRequest) -> Reply:
    """Start an agent unless it runs already, the host is full, or the engine has given up on this call."""
    root = allocation_dir.root(request["directory"])
    home = os.path.join(root, request["tag"], request["allocation"])
    allocation_dir.make(root)
    with allocation_dir.locked(root):
        if allocation_dir.is_running(home):
            return {"state": "started"}
        running = sum(allocation_dir.is_running(other) for _, _, other in allocation_dir.homes(root))
        if running >= request["room"]:
            return {"state": "full", "running": running}
        if time.time() > request["start_by"]:
            return {"state": "late"}
        allocation_dir.make(os.path.dirname(home), home)
        allocation_dir.remove(home, allocation_dir.STOPPING)
        try:
            allocation_dir.write(os.path.join(home, allocation_dir.TOKEN), request["credentials"])
            _spawn(home, request["script"], request["grace_s"])
        except OSError:
            allocation_dir.remove(home, allocation_dir.TOKEN)
            raise
    return {"state": "started"}


def cancel(request: CancelRequest) -> Reply:
    """Stop an agent: SIGTERM, its grace period, then SIGKILL for all that is left of it and of what it started."""
    root = allocation_dir.root(request["directory"])
    home = os.path.join(root, request["tag"], request["allocation"])
    if not os.path.isdir(home):
        return {"state": "stopped"}
    with allocation_dir.locked(root):
        process = allocation_dir.record(home)
    if process is not None and process["node"] != process_tree.node_name():
        return {"state": "stopped"}
    if process is not None and process["boot"] == process_tree.boot_id():
        remaining = _stop(home, process)
        if remaining:
            return {"state": "alive", "pids": remaining}
    allocation_dir.remove(home, allocation_dir.RECORD, allocation_dir.TOKEN, allocation_dir.STOPPING)
    return {"state": "stopped"}


def clean_up(request: CleanUpRequest) -> Reply:
    """Remove directories of allocations that ended long ago; a token means alive, whichever engine started it."""
    removed = 0
    for tag, allocation, home in allocation_dir.homes(allocation_dir.root(request["directory"])):
        process = allocation_dir.record(home)
        if process is not None and process["node"] == process_tree.node_name() and not allocation_dir.is_alive(process):
            allocation_dir.remove_unused_token(home)
        active = tag == request["tag"] and allocation in request["active"]
        has_token = os.path.exists(os.path.join(home, allocation_dir.TOKEN))
        if active or has_token or allocation_dir.untouched_s(home) < request["keep_s"]:
            continue
        shutil.rmtree(home, ignore_errors=True)
        removed += 1
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(home))
    return {"state": "cleaned", "removed": removed}


# --- start


def _spawn(home: str, script: str, grace_s: float) -> None:
    """Start the script in a session of its own; raise the child's OSError if it could not become the script."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            _become_agent(home, script, grace_s)
        except OSError as error:
            os.write(writer, json.dumps([error.errno, error.strerror, str(error.filename or home)]).encode())
        finally:
            os._exit(_EXEC_FAILED)
    os.close(writer)
    # The pipe is closed by a successful exec.
    with open(reader, "rb") as file:
        failure = file.read()
    if failure:
        number, why, path = json.loads(failure.decode())
        raise OSError(number, why, path)


def _become_agent(home: str, script: str, grace_s: float) -> None:
    """Record this process, then replace it by the script."""
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    log = os.open(os.path.join(home, allocation_dir.LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    own = process_tree.identify(os.getpid())
    record: ProcessRecord = {
        "pid": own[0],
        "started": own[1],
        "boot": process_tree.boot_id(),
        "node": process_tree.node_name(),
        "grace_s": grace_s,
    }
    allocation_dir.write(os.path.join(home, allocation_dir.RECORD), json.dumps(record))
    # The agent outlives the connection, so it must not inherit variables that describe it.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SSH_")}
    env[process_tree.ALLOCATION_MARK] = _mark(own)
    os.execvpe("sh", ["sh", "-c", script], env)


def _mark(agent: ProcessId) -> str:
    """Return the value of `ALLOCATION_MARK` for everything that this agent starts."""
    return "{}-{}".format(*agent)


# --- cancel


def _stop(home: str, record: ProcessRecord) -> list[int]:
    """Stop an agent and everything it started; return the pids that are still alive."""
    agent = (record["pid"], record["started"])
    if not process_tree.is_alive(agent):
        return process_tree.kill(_started_by(agent))
    members = process_tree.tree({agent})
    stopping = os.path.join(home, allocation_dir.STOPPING)
    if _is_first_stop(stopping):
        process_tree.send({agent}, signal.SIGTERM)
    deadline = _stopping_since(stopping) + record["grace_s"] + MARGIN_S
    look_at = 0.0
    while process_tree.is_alive(agent) and time.time() < deadline:
        # Remember the children while the agent lives: once it has ended, they have another parent.
        if time.monotonic() >= look_at:
            members |= process_tree.tree({agent})
            look_at = time.monotonic() + TREE_EVERY_S
        time.sleep(process_tree.POLL_S)
    return process_tree.kill(members | {agent} | _started_by(agent))


def _started_by(agent: ProcessId) -> set[ProcessId]:
    """Return processes of an agent that may have ended: those in its session, and those with its mark."""
    return process_tree.in_session(agent) | process_tree.marked(_mark(agent))


def _is_first_stop(stopping: str) -> bool:
    """Create the file and return whether it is new; also True where no file can be created."""
    try:
        os.close(os.open(stopping, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _stopping_since(stopping: str) -> float:
    try:
        return min(time.time(), os.stat(stopping).st_mtime)
    except OSError:
        return time.time()


# --- this machine


def _machine(path: str) -> Reply:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    disk = os.statvfs(path)
    return {
        "cpus": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
    }


def _gpus() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith(b"GPU ") for line in done.stdout.splitlines())


def _end_of_log(home: str, record: ProcessRecord) -> str:
    if record["boot"] != process_tree.boot_id():
        return "the host was rebooted"
    try:
        with open(os.path.join(home, allocation_dir.LOG), "rb") as file:
            return _tail(file)
    except OSError:
        return ""


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
    return file.read().decode("utf-8", "replace")
