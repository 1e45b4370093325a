"""Ray driver: the process that talks to Ray on behalf of the engine, in lines of JSON on standard input and output.

It is run as a script by an interpreter that has Ray and need not have Shoal. So it imports nothing of Shoal, and since
its classes are those of `__main__`, Ray sends them to the nodes by value.

Protocol: two messages without a request, `{"id": 0, "ok": "started"}` and, once the cluster is reached, id 1 with the
versions. Then each request `{"id": n, "do": METHOD, …}` is answered by `{"id": n, "ok": RESULT}` or
`{"id": n, "failed": KIND, "why": TEXT}`, in any order. The end of standard input ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NAMESPACE = "shoal"
# A coordinator cancels 16 allocations at a time, each for its whole grace period; other requests must not wait.
THREADS = 24
HEALTH_S = 3.0
CREATED_S = 5.0
OUTPUT_S = 1.0
DEAD_S = 5.0
FORGET_S = 600.0
KEEP_S = 24 * 3600.0
LEAVE_S = 5.0
POLL_S = 0.05
LAST_LINES = 8
PR_SET_CHILD_SUBREAPER = 36
ACTOR = "actor.json"


class AgentActor:
    """Actor whose child is the agent: when either ends, so does the other.

    The script prints its directory, reads the token from standard input up to a dot, and keeps that pipe as the agent's
    lifeline. Whatever it starts, in whatever session, stays a descendant of this process and is killed with it.
    """

    def __init__(self, script: str, credentials: str) -> None:
        import ray

        self._actor = ray.get_runtime_context().current_actor
        self._ended = threading.Event()
        self._home = ""
        self._output: list[str] = []
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
        self._agent = subprocess.Popen(
            ["/bin/sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": path},
            start_new_session=True,
        )
        threading.Thread(target=self._watch, args=(credentials,), daemon=True).start()

    def end(self, grace_s: float) -> None:
        """Stop the agent: SIGTERM, and SIGKILL for what is left of it after the grace period."""
        if self._agent.poll() is None:
            self._agent.send_signal(signal.SIGTERM)
        if not self._ended.wait(grace_s):
            _kill_descendants()
            self._ended.wait(LEAVE_S)

    def leave(self, message: str) -> None:
        """End this actor; Ray reports the message as the cause of its death."""
        from ray._raylet import raise_sys_exit_with_custom_error_message

        raise_sys_exit_with_custom_error_message(message)

    def _watch(self, credentials: str) -> None:
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._agent.stdin.write(f"{credentials.strip()}\n.\n".encode())
            self._agent.stdin.flush()
        reader = threading.Thread(target=self._read_output, daemon=True)
        reader.start()
        code = self._agent.wait()
        _kill_descendants()
        reader.join(OUTPUT_S)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        message = f"the agent ended with {how}: {self._exit_message()}"
        if self._home:
            Path(self._home, "token").unlink(missing_ok=True)
        self._ended.set()
        self._actor.leave.remote(message)
        time.sleep(LEAVE_S)
        os._exit(1)

    def _read_output(self) -> None:
        assert self._agent.stdout is not None
        for line in self._agent.stdout:
            text = line.decode(errors="replace").strip()
            if not self._home and text.startswith("home="):
                self._home = text.removeprefix("home=")
                with contextlib.suppress(OSError):
                    Path(self._home, ACTOR).write_text(json.dumps(_identity(os.getpid())))
                threading.Thread(target=_clean_up, args=(Path(self._home).parents[1],), daemon=True).start()
            elif text:
                self._output = [*self._output, text][-LAST_LINES:]

    def _exit_message(self) -> str:
        """Return the agent's last error or last line; if it never started, the output of the script."""
        try:
            lines = Path(self._home, "agent.log").read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        except OSError:
            lines = []
        output = lines or self._output
        # An interpreter that is too old for `-P` says so, and then prints how it is used.
        causes = [at for at, line in enumerate(output) if line.startswith("error[") or "option: -P" in line]
        since = max(causes, default=len(output) - 1)
        words = [" ".join(line.split()) for line in output[since:] if not line.strip().startswith("more ")]
        return "; ".join(words)[:400] or "it wrote no output"


def _kill_descendants() -> None:
    """Kill all descendants of this process, until none is left; orphans become our children, so none is missed."""
    deadline = time.monotonic() + LEAVE_S
    while (remaining := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _descendants(pid: int) -> list[int]:
    """Return the living descendants of a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    tree = [pid]
    for parent_pid in tree:
        tree += children.get(parent_pid, [])
    return tree[1:]


def _clean_up(root: Path) -> None:
    """Remove directories of allocations on this node that ended long ago; a token in one means alive."""
    for home in [path for path in root.glob("*/*") if path.is_dir()]:
        with contextlib.suppress(OSError):
            if _has_died(home):
                (home / "token").unlink(missing_ok=True)
            if (home / "token").exists():
                continue
            touched = max(path.stat().st_mtime for path in [*home.iterdir()] or [home])
            if time.time() - touched > KEEP_S:
                shutil.rmtree(home, ignore_errors=True)
                home.parent.rmdir()


def _has_died(home: Path) -> bool:
    """Return whether the allocation's actor died without removing its token; False if it is of another engine."""
    try:
        node, boot, pid, started = json.loads((home / ACTOR).read_text())
    except (OSError, ValueError):
        return False
    current = _identity(pid)
    return bool(node == current[0] and (boot, started) != (current[1], current[3]))


def _identity(pid: int) -> list[Any]:
    """Return what identifies a process on any node that shares the disk: node, boot, pid and start time.

    The start time is empty if the process has ended, even if its parent has not reaped it yet.
    """
    started = ""
    with contextlib.suppress(OSError):
        fields = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
        started = "" if fields[0] in "ZX" else fields[19]
    return [socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip(), pid, started]


def list_actors(prefix: str, known: Mapping[str, str]) -> dict[str, Any]:
    """Return the actors whose names have this prefix, those `known` by id even if they are dead, and the nodes.

    Before Ray takes a node away, for example a preempted one, it drains it: `ends_at` is the end of the drain.
    """
    import ray
    from ray._private import state

    names = dict(known)
    for name in ray.util.list_named_actors():
        if name.startswith(prefix):
            with contextlib.suppress(ValueError):
                names[ray.get_actor(name)._actor_id.hex()] = name
    draining = state.state.get_draining_nodes()
    actors = []
    for actor_id, name in names.items():
        info = state.actors(actor_id)
        if info:
            cause = info["DeathCause"]
            context = cause.WhichOneof("context") if cause is not None else None
            why = getattr(getattr(cause, context), "error_message", context) if context else ""
            ends_at = draining.get(info["Address"]["NodeID"], 0) / 1000 or None
            actors.append({"name": name, "actor": actor_id, "state": info["State"], "why": why, "ends_at": ends_at})
    free = state.available_resources_per_node()
    nodes = [
        {"total": node["Resources"], "free": free.get(node["NodeID"], {}), "labels": node.get("Labels", {})}
        for node in ray.nodes()
        if node["Alive"]
    ]
    return {"actors": actors, "nodes": nodes}


class RayDriver:
    """Requests to a cluster. Through Ray's client, `list_actors` runs as a task: only inside is all of it visible."""

    def __init__(self, address: str) -> None:
        import ray

        self._through_client = address.startswith("ray://")
        self._dead_since: dict[str, float] = {}
        self._known: dict[str, str] = {}
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        self._list_task = ray.remote(num_cpus=0, max_retries=1)(list_actors) if self._through_client else None

    def submit(self, name: str, script: str, credentials: str, options: dict[str, Any], group: str) -> str:
        """Create the actor; return its name once the cluster would keep it even if this process ended."""
        import ray

        actor = ray.remote(AgentActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            **({"scheduling_strategy": _in_group(group)} if group else {}),
            **options,
        )
        created = actor.remote(script, credentials)
        self._known[created._actor_id.hex()] = name
        deadline = time.monotonic() + CREATED_S
        while self._state(name) == "DEPENDENCIES_UNREADY" and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return name

    def watch(self, prefix: str) -> dict[str, Any]:
        """Return `list_actors`, with actors that died up to `FORGET_S` ago."""
        now = time.monotonic()
        known = {actor_id: name for actor_id, name in self._known.copy().items() if name.startswith(prefix)}
        reply = self._list(prefix, known)
        for actor in reply["actors"]:
            actor_id = actor["actor"]
            self._known[actor_id] = actor["name"]
            since = self._dead_since.setdefault(actor_id, now) if actor["state"] == "DEAD" else now
            if now - since > FORGET_S:
                self._known.pop(actor_id, None)
                self._dead_since.pop(actor_id, None)
        return reply

    def cancel(self, name: str, grace_s: float) -> None:
        """Stop the agent, then kill the actor; return when Ray reports it as dead."""
        import ray

        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return
        if self._state(name) == "ALIVE":
            ray.wait([actor.end.remote(grace_s)], timeout=grace_s + LEAVE_S)
        ray.kill(actor, no_restart=True)
        deadline = time.monotonic() + DEAD_S
        while self._state(name) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the cluster's nodes with their total and free resources."""
        return list(self._list("\0", {})["nodes"])

    def _state(self, name: str) -> str:
        """Return the state of an actor; "" if it is dead or never existed."""
        states = [actor["state"] for actor in self._list(name, {})["actors"] if actor["name"] == name]
        return states[0] if states and states[0] != "DEAD" else ""

    def _list(self, prefix: str, known: dict[str, str]) -> dict[str, Any]:
        import ray

        if self._list_task is None:
            return list_actors(prefix, known)
        reply: dict[str, Any] = ray.get(self._list_task.remote(prefix, known))
        return reply


def _in_group(name: str) -> Any:
    """Return the strategy that uses any bundle of the placement group with this name, in whatever namespace."""
    import ray
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    groups = [
        group
        for group in ray.util.placement_group_table().values()
        if group["name"] == name and group["state"] not in ("REMOVED", "INFEASIBLE")
    ]
    if len(groups) != 1:
        raise ValueError(f"need one placement group named {name!r}, found {len(groups)}")
    group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(groups[0]["placement_group_id"])))
    return PlacementGroupSchedulingStrategy(placement_group=group)


# --- requests and replies


def main() -> int:
    """Connect to the cluster and answer requests until standard input ends; return the exit code."""
    address = sys.argv[sys.argv.index("--address") + 1]
    reply = _take_output()
    reply({"id": 0, "ok": "started"})
    try:
        import ray
    except ImportError as error:
        reply({"id": 1, "failed": "no ray", "why": f"{sys.executable}: {error}"})
        return 1
    try:
        _check_health(address)
        driver = RayDriver(address)
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is reported to the engine
        reply({"id": 1, "failed": _kind(error), "why": _text(error)})
        return 1
    reply({"id": 1, "ok": {"ray": ray.__version__, "python": ".".join(map(str, sys.version_info[:3]))}})
    with ThreadPoolExecutor(THREADS) as pool:
        for line in sys.stdin:
            pool.submit(_handle, driver, json.loads(line), reply)
        _leave_cluster()
    return 0


def _handle(driver: RayDriver, request: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
    number, what = request.pop("id"), request.pop("do")
    try:
        reply({"id": number, "ok": getattr(driver, what)(**request)})
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is reported to the engine
        reply({"id": number, "failed": _kind(error), "why": _text(error)})


def _take_output() -> Callable[[dict[str, Any]], None]:
    """Reserve standard output for replies, since Ray prints to it; return a function that sends one."""
    out, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(message) + "\n")
            out.flush()

    return reply


def _check_health(address: str) -> None:
    """Raise if the head accepts connections but does not answer: `ray.init` would wait for it much longer."""
    try:
        import grpc
    except ImportError:
        return
    if address == "auto" or os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=HEALTH_S)
        except grpc.FutureTimeoutError as error:
            raise ConnectionError(f"the head node did not answer within {HEALTH_S:g} s") from error


def _kind(error: Exception) -> str:
    text = str(error)
    if "ersion mismatch" in text:
        return "version"
    if "Raylet" in text or "node_ip_address" in text:
        return "not a node"
    return "refused" if isinstance(error, ValueError | TypeError) else "lost"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def _leave_cluster() -> None:
    """Leave the cluster if it answers, and end in any case: some of our threads may wait forever."""
    import ray

    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
