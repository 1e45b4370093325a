"""A process of its own that talks to Ray for the engine, in lines of JSON over its standard input and output.

Ray's client waits for a head that is away for as long as it likes, and ends its process when it gives up; both may
happen to this one. It is run as a script by an interpreter that has Ray and need not have Shoal: so it imports nothing
of Shoal, and since its classes are those of `__main__`, Ray sends them to the nodes by value.
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
# A coordinator cancels 16 hires at a time, and each of them may use its whole grace: others must be heard meanwhile.
AT_ONCE = 24
HEALTH_S = 3.0
CREATED_S = 5.0
HEARD_S = 1.0
DEAD_S = 5.0
FORGET_S = 600.0
KEEP_S = 24 * 3600.0
LEAVE_S = 5.0
LOOK_S = 0.05
LAST_LINES = 8
ADOPT_ORPHANS = 36
ACTOR = "actor.json"


class AgentActor:
    """The actor: the agent is its child, whose end is its own, and its own end is the agent's.

    The script says where it is at home, reads the token from its input up to a dot, and keeps the rest of that pipe as
    the agent's lifeline. Whatever it starts, in whatever session, stays below this process and ends with the agent.
    """

    def __init__(self, script: str, credentials: str) -> None:
        import ray

        self._me = ray.get_runtime_context().current_actor
        self._over = threading.Event()
        self._home = ""
        self._said: list[str] = []
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
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
        """Tell the agent to hand over and go; what is left of it after the grace is killed."""
        if self._agent.poll() is None:
            self._agent.send_signal(signal.SIGTERM)
        if not self._over.wait(grace_s):
            _kill_all_below()
            self._over.wait(LEAVE_S)

    def leave(self, words: str) -> None:
        """End this actor with these as its last words."""
        from ray._raylet import raise_sys_exit_with_custom_error_message

        raise_sys_exit_with_custom_error_message(words)

    def _watch(self, credentials: str) -> None:
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._agent.stdin.write(f"{credentials.strip()}\n.\n".encode())
            self._agent.stdin.flush()
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        code = self._agent.wait()
        _kill_all_below()
        listener.join(HEARD_S)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        words = f"the agent ended with {how}: {self._last_words()}"
        if self._home:
            Path(self._home, "token").unlink(missing_ok=True)
        self._over.set()
        self._me.leave.remote(words)
        time.sleep(LEAVE_S)
        os._exit(1)

    def _listen(self) -> None:
        assert self._agent.stdout is not None
        for line in self._agent.stdout:
            text = line.decode(errors="replace").strip()
            if not self._home and text.startswith("home="):
                self._home = text.removeprefix("home=")
                with contextlib.suppress(OSError):
                    Path(self._home, ACTOR).write_text(json.dumps(_identity(os.getpid())))
                threading.Thread(target=_tidy, args=(Path(self._home).parents[1],), daemon=True).start()
            elif text:
                self._said = [*self._said, text][-LAST_LINES:]

    def _last_words(self) -> str:
        """The last error that the agent told, or its last line; if it never began, what the shell said."""
        try:
            lines = Path(self._home, "agent.log").read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        except OSError:
            lines = []
        said = lines or self._said
        # An interpreter that is too old for `-P` tells so, and then how it is used.
        telling = [at for at, line in enumerate(said) if line.startswith("error[") or "option: -P" in line]
        since = max(telling, default=len(said) - 1)
        words = [" ".join(line.split()) for line in said[since:] if not line.strip().startswith("more ")]
        return "; ".join(words)[:400] or "it said nothing"


def _kill_all_below() -> None:
    """Kill what this process and all below it started, until nothing is left: who loses its parent comes to us."""
    deadline = time.monotonic() + LEAVE_S
    while (left := _below(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _below(pid: int) -> list[int]:
    """The living processes that descend from this one."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def _tidy(hires: Path) -> None:
    """Remove what hires left on this node that ended long ago; who lives has a token in its directory."""
    for home in [one for one in hires.glob("*/*") if one.is_dir()]:
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
    """Whether the actor of a hire is no more, which could not remove the token then; of others, others know."""
    try:
        node, boot, pid, born = json.loads((home / ACTOR).read_text())
    except (OSError, ValueError):
        return False
    now = _identity(pid)
    return bool(node == now[0] and (boot, born) != (now[1], now[3]))


def _identity(pid: int) -> list[Any]:
    """What no two processes have in common, wherever they share a disk: node, boot, number and time of birth."""
    try:
        born = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        born = ""
    return [socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip(), pid, born]


def look(prefix: str, known: Mapping[str, str]) -> dict[str, Any]:
    """The hires whose names begin like this, those that were known by id even if they are dead, and the nodes.

    Before Ray takes a node away, as one that is preempted, it drains it: then it is known until when it is there.
    """
    import ray
    from ray._private import state

    names = dict(known)
    for name in ray.util.list_named_actors():
        if name.startswith(prefix):
            with contextlib.suppress(ValueError):
                names[ray.get_actor(name)._actor_id.hex()] = name
    draining = state.state.get_draining_nodes()
    hires = []
    for actor, name in names.items():
        found = state.actors(actor)
        if found:
            cause = found["DeathCause"]
            which = cause.WhichOneof("context") if cause is not None else None
            why = getattr(getattr(cause, which), "error_message", which) if which else ""
            until = draining.get(found["Address"]["NodeID"], 0) / 1000 or None
            hires.append({"name": name, "actor": actor, "state": found["State"], "why": why, "until": until})
    free = state.available_resources_per_node()
    nodes = [
        {"total": one["Resources"], "free": free.get(one["NodeID"], {}), "labels": one.get("Labels", {})}
        for one in ray.nodes()
        if one["Alive"]
    ]
    return {"hires": hires, "nodes": nodes}


class RayDriver:
    """What can be asked of a cluster; through Ray's client it looks from within, since only there is all to be seen."""

    def __init__(self, address: str) -> None:
        import ray

        self._inside = address.startswith("ray://")
        self._dead_since: dict[str, float] = {}
        self._known: dict[str, str] = {}
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        self._look = ray.remote(num_cpus=0, max_retries=1)(look) if self._inside else None

    def submit(self, name: str, script: str, credentials: str, options: dict[str, Any], group: str) -> str:
        """Ask for the actor, and stay until the cluster itself wants it, whatever becomes of this process."""
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
        made = actor.remote(script, credentials)
        self._known[made._actor_id.hex()] = name
        deadline = time.monotonic() + CREATED_S
        while self._state(name) == "DEPENDENCIES_UNREADY" and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return name

    def watch(self, prefix: str) -> dict[str, Any]:
        now = time.monotonic()
        known = {actor: name for actor, name in self._known.copy().items() if name.startswith(prefix)}
        seen = self._see(prefix, known)
        for one in seen["hires"]:
            self._known[one["actor"]] = one["name"]
            since = self._dead_since.setdefault(one["actor"], now) if one["state"] == "DEAD" else now
            if now - since > FORGET_S:
                self._known.pop(one["actor"], None)
                self._dead_since.pop(one["actor"], None)
        return seen

    def cancel(self, name: str, grace_s: float) -> None:
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
            time.sleep(LOOK_S)

    def capacity(self) -> list[dict[str, Any]]:
        return list(self._see("\0", {})["nodes"])

    def _state(self, name: str) -> str:
        """The state of a hire, or nothing if it is dead or was never there."""
        states = [one["state"] for one in self._see(name, {})["hires"] if one["name"] == name]
        return states[0] if states and states[0] != "DEAD" else ""

    def _see(self, prefix: str, known: dict[str, str]) -> dict[str, Any]:
        import ray

        if self._look is None:
            return look(prefix, known)
        seen: dict[str, Any] = ray.get(self._look.remote(prefix, known))
        return seen


def _in_group(name: str) -> Any:
    """Into any bundle of the placement group with this name, in whatever namespace it was made."""
    import ray
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    found = [
        one
        for one in ray.util.placement_group_table().values()
        if one["name"] == name and one["state"] not in ("REMOVED", "INFEASIBLE")
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} placement groups are named {name!r}, not one")
    made = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(found[0]["placement_group_id"])))
    return PlacementGroupSchedulingStrategy(placement_group=made)


# --- the conversation


def main() -> int:
    address = sys.argv[sys.argv.index("--address") + 1]
    answers = _take_output()
    answers({"id": 0, "ok": "started"})
    try:
        import ray
    except ImportError as error:
        answers({"id": 1, "failed": "no ray", "why": f"{sys.executable}: {error}"})
        return 1
    try:
        _check_health(address)
        driver = RayDriver(address)
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is told to the engine
        answers({"id": 1, "failed": _kind(error), "why": _words(error)})
        return 1
    answers({"id": 1, "ok": {"ray": ray.__version__, "python": ".".join(map(str, sys.version_info[:3]))}})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in sys.stdin:
            pool.submit(_answer, driver, json.loads(line), answers)
        _let_go()
    return 0


def _answer(driver: RayDriver, request: dict[str, Any], answers: Callable[[dict[str, Any]], None]) -> None:
    number, what = request.pop("id"), request.pop("do")
    try:
        answers({"id": number, "ok": getattr(driver, what)(**request)})
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is told to the engine
        answers({"id": number, "failed": _kind(error), "why": _words(error)})


def _take_output() -> Callable[[dict[str, Any]], None]:
    """Keep the standard output for answers alone: Ray prints to it."""
    out, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(message) + "\n")
            out.flush()

    return answer


def _check_health(address: str) -> None:
    """A head that accepts connections and does not answer would be waited for much longer by `ray.init`."""
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
            raise ConnectionError(f"the head accepted no conversation within {HEALTH_S:g} s") from error


def _kind(error: Exception) -> str:
    words = str(error)
    if "ersion mismatch" in words:
        return "version"
    if "Raylet" in words or "node_ip_address" in words:
        return "not a node"
    return "refused" if isinstance(error, ValueError | TypeError) else "lost"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def _let_go() -> None:
    """Leave the cluster if it answers, and end in any case: some of our threads may wait for ever."""
    import ray

    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
