"""Engine for Ray: an agent is the child of a detached, named actor.

Why an actor. A detached actor outlives the driver that created it, and its name makes it unique: `get_if_exists` turns
a second submission into a lookup. The actor's name, `shoal-TAG-ALLOCATION`, is the handle. The actor starts the agent
as a child process, tells Ray when that ends, and when the actor dies, the agent dies with it: it holds the other end of
a pipe, the agent's lifeline. So the loss of a node is the death of an actor, which Ray reports.

Waiting and autoscaling. An allocation that waits for a node is an actor that Ray cannot place yet. To Ray's autoscaler
that is demand: it adds nodes for as long as allocations wait, and removes them when they are idle. Growing a cluster
needs nothing else.

The driver in its own process. Ray's client may wait for a lost head node for as long as it likes, and it ends its
process when it gives up. Neither may happen to the coordinator. So Ray is imported only by `driver.py`, which runs in a
process of its own under an interpreter that has the cluster's versions of Ray and Python (`client`), and which need not
have Shoal. `driver_client` talks to it in lines of JSON, many requests at a time:

- The driver first says that it was started, then that it has reached the cluster; both are awaited.
- A request that is not answered in time raises `EngineUnreachable`, and from then on requests wait only `LATE_S`,
  since the cluster is probably away. When it comes back, the driver answers by itself.
- A driver that is silent for `GIVE_UP_S`, reports a lost cluster or dies is killed, and the next request starts a new
  one. Allocations are not affected: they belong to the cluster, not to the driver.

The address is probed by a plain TCP connection before a driver is started, because Ray itself retries for long.

The token is not part of the request that `render` shows. It is sent with the submission, written to the agent's
directory from standard input, and removed by the actor when the agent has ended.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import Meta

from shoal.engines import agent_script, exit_message, grace_period
from shoal.engines.engine import AllocationRequest, AllocationStatus, Capacity, Engine, EngineOptions, RenderedRequest
from shoal.engines.ray import nodes as ray_nodes
from shoal.engines.ray.driver_client import DriverError, RayDriverClient
from shoal.errors import AllocationRefused, EngineUnreachable

CONNECT_S = 20.0
CONNECT_THROUGH_CLIENT_S = 45.0
LATE_S = 2.0
GIVE_UP_S = 60.0
PROBE_S = 2.0
REPLY_S = 6.0
REPLY_THROUGH_CLIENT_S = 20.0
SUBMIT_S = 15.0
CANCEL_S = 20.0
LIFELINE = "3"
DRIVER = Path(__file__).with_name("driver.py")

_BEFORE = (
    'printf "home=%s\\n" "$home"',
    'rm -f "$home/token"',
    'while IFS= read -r line && [ "$line" != . ]; do printf "%s\\n" "$line"; done >"$home/token"',
    f"exec {LIFELINE}<&0 </dev/null",
)


class RayOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a Ray pool.

    `address` is `auto` or `HOST:6379` on a node of the cluster, and `ray://HOST:10001` from anywhere else. `client` is
    an interpreter on this machine with the cluster's versions of Ray and Python, if Shoal's own has others.

    An allocation takes `cpus` (one, or what its members need), `gpus`, `memory_bytes` and custom `resources` of a node,
    as `{"spot" = 1}`, and runs only on nodes with these `labels`, as `{"ray.io/market-type" = "spot"}`; values may be
    `!x`, `in(a,b)` and `!in(a,b)`. `placement` is `pack` or `spread`; `group` is the name of an existing placement
    group, whose bundles the allocations fill. `grace_s` is how long a cancelled agent may take to hand over. `python`
    is searched first where Ray's own interpreter is.
    """

    address: str = "auto"
    client: str = ""
    cpus: Annotated[float, Meta(ge=0)] | None = None
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    resources: Mapping[str, float] = msgspec.field(default_factory=dict)
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    placement: Literal["pack", "spread"] = "pack"
    group: str = ""
    grace_s: Annotated[float, Meta(ge=0)] = 30.0


class Ray(Engine):
    """Agents on the nodes of a Ray cluster."""

    options_type: ClassVar[type[EngineOptions]] = RayOptions
    takes_images: ClassVar[bool] = True
    options: RayOptions
    sized = True

    def __init__(self, pool: str, options: EngineOptions) -> None:
        super().__init__(pool, options)
        self._driver: RayDriverClient | None = None
        self._lock = threading.Lock()
        # Used only to explain what an allocation waits for.
        self._requested: dict[str, dict[str, float]] = {}

    @property
    def size(self) -> tuple[int, int]:
        return int(self.options.cpus or 0), self.options.memory_bytes

    def render(self, request: AllocationRequest) -> RenderedRequest:
        return RenderedRequest(self._argv, json.dumps(self._submit_call(request), indent=2) + "\n")

    def submit(self, request: AllocationRequest) -> str:
        access = request.credentials
        call = {**self._submit_call(request), "credentials": f"{access.token}\n{access.certificate_pem or ''}"}
        resources = {"CPU": call["options"]["num_cpus"], "memory": float(call["options"].get("memory", 0))}
        self._requested[request.allocation] = {name: amount for name, amount in resources.items() if amount}
        return cast(str, self._call(call, SUBMIT_S + self._reply_s))

    def watch(self, tag: str) -> list[AllocationStatus]:
        prefix = actor_name(tag, "")
        reply = self._call({"do": "watch", "prefix": prefix}, self._reply_s)
        statuses: dict[str, AllocationStatus] = {}
        for actor in reply["actors"]:
            allocation = actor["name"].removeprefix(prefix)
            earlier = statuses.get(allocation)
            if not allocation.startswith("-") and (earlier is None or earlier.state == "gone"):
                statuses[allocation] = self._status(allocation, actor, reply["nodes"])
        return list(statuses.values())

    def cancel(self, handle: str) -> None:
        grace_s = self.options.grace_s + grace_period.MARGIN_S
        self._call({"do": "cancel", "name": handle, "grace_s": grace_s}, grace_s + CANCEL_S + self._reply_s)

    def cancel_timeout_s(self, grace_s: float) -> float:
        del grace_s  # the pool's own `grace_s` applies: `grace_period.within` has shortened the agent's to fit
        return self.options.grace_s + grace_period.MARGIN_S + CANCEL_S + self._reply_s + self._connect_s

    def capacity(self) -> list[Capacity]:
        return ray_nodes.capacity(self.options, self._call({"do": "nodes"}, self._reply_s))

    def close(self) -> None:
        with self._lock:
            driver, self._driver = self._driver, None
        if driver is not None:
            driver.end()

    # --- calls to the driver

    @property
    def _argv(self) -> tuple[str, ...]:
        return (self.options.client or sys.executable, "-P", str(DRIVER), "--address", self.options.address)

    def _submit_call(self, request: AllocationRequest) -> dict[str, Any]:
        tied = dataclasses.replace(request, options=(*request.options, "--lifeline", LIFELINE))
        tied = grace_period.within(tied, self.options.grace_s + grace_period.MARGIN_S)
        return {
            "do": "submit",
            "name": actor_name(request.tag, request.allocation),
            "options": actor_options(self.options, request.cpus, request.memory_bytes),
            "group": self.options.group,
            "script": agent_script.script(tied, self.options, python=self.options.python or "python3", before=_BEFORE),
        }

    def _status(
        self, allocation: str, actor: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]
    ) -> AllocationStatus:
        name = actor["name"]
        if actor["state"] == "DEAD":
            self._requested.pop(allocation, None)
            unfit = exit_message.of_python(actor["why"], self.options.python)
            return AllocationStatus(allocation, name, "gone", unfit or brief(actor["why"]))
        if actor["state"] == "ALIVE":
            why = "Ray drains its node" if actor["ends_at"] else ""
            return AllocationStatus(allocation, name, "running", why, actor["ends_at"])
        why = ray_nodes.why_waiting(self.options, nodes, self._requested.get(allocation))
        return AllocationStatus(allocation, name, "waiting", why)

    # --- the driver

    @property
    def _through_client(self) -> bool:
        return self.options.address.startswith("ray://")

    @property
    def _connect_s(self) -> float:
        """Longest time to connect; Ray starts a process on the head node for each of its clients."""
        return CONNECT_THROUGH_CLIENT_S if self._through_client else CONNECT_S

    @property
    def _reply_s(self) -> float:
        """Longest time for a reply; through Ray's client, a worker may have to start first."""
        return REPLY_THROUGH_CLIENT_S if self._through_client else REPLY_S

    def _call(self, request: Mapping[str, Any], within_s: float) -> Any:
        """Return the driver's reply; raise `EngineUnreachable` or `AllocationRefused`."""
        driver = self._connected()
        try:
            return self._await(driver, driver.call(request), within_s)
        except DriverError as failure:
            if failure.kind == "refused":
                raise AllocationRefused("Ray rejected the request", where=self._where, why=failure.why) from failure
            self._drop(driver)
            raise self._unreachable(failure.why) from failure

    def _connected(self) -> RayDriverClient:
        """Return the driver that all threads share, started if necessary and connected to the cluster."""
        with self._lock:
            if self._driver is None or self._driver.ended:
                self._probe()
                self._driver = self._start()
            driver = self._driver
        try:
            self._await(driver, driver.ready, self._connect_s)
        except DriverError as failure:
            self._drop(driver)
            raise self._failure(failure) from failure
        return driver

    def _await(self, driver: RayDriverClient, reply: Future[Any], within_s: float) -> Any:
        """Return the reply; raise `EngineUnreachable` if it is late.

        Once a reply was late, others are awaited only briefly: the cluster is away, or the driver hangs. The driver is
        kept for a while, since it answers at once when the cluster comes back.
        """
        timeout_s = within_s if driver.late_since is None else min(within_s, LATE_S)
        try:
            return reply.result(timeout_s)
        except TimeoutError as error:
            if driver.late_for_s() > GIVE_UP_S:
                self._drop(driver)
            raise self._unreachable(f"no reply within {timeout_s:g} s") from error

    def _probe(self) -> None:
        """Raise at once if no process listens at the address: Ray itself would try for long."""
        if self.options.address == "auto":
            return
        host_and_port = split_address(self.options.address)
        if host_and_port is None:
            raise AllocationRefused(
                f"invalid address of a Ray cluster: {self.options.address!r}",
                where=f"[pool.{self.pool}] address",
                do="use auto, HOST:6379 (on a node of the cluster) or ray://HOST:10001 (from elsewhere)",
            )
        try:
            socket.create_connection(host_and_port, PROBE_S).close()
        except OSError as error:
            raise self._unreachable(str(error)) from error

    def _start(self) -> RayDriverClient:
        try:
            return RayDriverClient(self._argv)
        except OSError as error:
            raise AllocationRefused(
                "cannot start the interpreter for Ray", where=self._where, why=str(error), do="correct client ="
            ) from error

    def _drop(self, driver: RayDriverClient) -> None:
        with self._lock:
            if self._driver is driver:
                self._driver = None
        driver.kill()

    def _failure(self, failure: DriverError) -> EngineUnreachable | AllocationRefused:
        """Return why the driver did not reach the cluster: final where only the user can fix it."""
        where, why = self._where, failure.why
        if failure.kind == "never started":
            what, do = "cannot use the interpreter for Ray", "correct client ="
        elif failure.kind == "no ray":
            what = "Ray is not installed on this machine"
            do = "pip install 'shoal-train[ray]', or set client = to an interpreter that has Ray"
        elif failure.kind == "version":
            what = "the cluster has another version of Ray or Python"
            do = "set client = to an interpreter with the cluster's versions of Python and Ray"
        elif failure.kind == "not a node":
            what = "this machine is not a node of that cluster"
            do = "set address = ray://HOST:10001, which can be reached from outside"
        else:
            return self._unreachable(why)
        return AllocationRefused(what, where=where, why=why, do=do)

    @property
    def _where(self) -> str:
        return f"[pool.{self.pool}] address {self.options.address}"

    def _unreachable(self, why: str) -> EngineUnreachable:
        do = "start Ray here, or set address" if self.options.address == "auto" else "check that its head node is up"
        return EngineUnreachable("cannot reach the Ray cluster", where=self._where, why=why, do=do)


# --- pure


def actor_name(tag: str, allocation: str) -> str:
    """Return the name of an allocation's actor.

    Dashes in the tag are doubled, and allocations never begin with a dash: so no name has another tag's prefix.
    """
    return f"shoal-{tag.replace('-', '--')}-{allocation}"


def actor_options(options: RayOptions, cpus: int = 0, memory_bytes: int = 0) -> dict[str, Any]:
    """Return the actor's options for Ray; `cpus` and `memory_bytes` apply where the pool configures none."""
    num_cpus = options.cpus if options.cpus is not None else float(cpus or ray_nodes.CPUS)
    actor: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": options.gpus}
    if memory := options.memory_bytes or memory_bytes:
        actor["memory"] = memory
    if options.resources:
        actor["resources"] = dict(options.resources)
    if options.labels:
        actor["label_selector"] = dict(options.labels)
    if options.image:
        actor["runtime_env"] = {"image_uri": options.image}
    if options.placement == "spread" and not options.group:
        actor["scheduling_strategy"] = "SPREAD"
    return actor


def split_address(address: str) -> tuple[str, int] | None:
    """Return host and port; None if the address is malformed."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if "://" in host or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def brief(cause: str) -> str:
    """Return the cause of an actor's death in short: the agent's own message if there is one."""
    text = " ".join(cause.split())
    _, marker, message = text.partition("the agent ended with ")
    if marker:
        return marker + message
    if "its node has died" in text:
        return "its node is lost: " + (text.partition("unexpectedly: ")[2] or text)[:300]
    return text.partition(" Some common causes")[0][:300]
