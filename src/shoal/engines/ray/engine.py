"""Ray: an agent is the child of a detached, named actor, so that the loss of its node is the actor's death.

A hire that waits for room is an actor that Ray cannot place yet. To Ray's autoscaler that is demand: where there is one
it brings nodes for as long as hires wait, and takes them away when they idle, so growing needs nothing else.

Ray itself is talked to by a process of its own (`ray_driver`), which may hang or die, and is then started anew.
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
CONNECT_INSIDE_S = 45.0
LATE_S = 2.0
GIVE_UP_S = 60.0
PROBE_S = 2.0
ANSWER_S = 6.0
ANSWER_INSIDE_S = 20.0
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
    """A pool of Ray.

    `address` is `auto` on a node of the cluster, `HOST:6379` there too, and `ray://HOST:10001` from anywhere else.
    `client` is an interpreter here that has the cluster's Ray and Python, if that is not Shoal's own.

    A hire takes `cpus` (one, or what its members need), `gpus`, `memory_bytes` and custom `resources` of a node, as
    `{"spot" = 1}`, and goes only to nodes with these `labels`, as `{"ray.io/market-type" = "spot"}`; values may be
    `!x`, `in(a,b)` and `!in(a,b)`. `placement` is `pack` or `spread`; `group` names a placement group that exists,
    whose bundles the hires then fill. `grace_s` is how long a cancelled agent may take to hand over. `python` is looked
    for where Ray's own is, first.
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
        self._link: RayDriverClient | None = None
        self._lock = threading.Lock()
        # Only for what is said of hires that wait.
        self._takes: dict[str, dict[str, float]] = {}

    @property
    def size(self) -> tuple[int, int]:
        return int(self.options.cpus or 0), self.options.memory_bytes

    def render(self, request: AllocationRequest) -> RenderedRequest:
        return RenderedRequest(self._argv, json.dumps(self._request(request), indent=2) + "\n")

    def submit(self, request: AllocationRequest) -> str:
        given = request.credentials
        call = {**self._request(request), "credentials": f"{given.token}\n{given.certificate_pem or ''}"}
        asked = {"CPU": call["options"]["num_cpus"], "memory": float(call["options"].get("memory", 0))}
        self._takes[request.allocation] = {name: amount for name, amount in asked.items() if amount}
        return cast(str, self._ask(call, SUBMIT_S + self._answer_s))

    def watch(self, tag: str) -> list[AllocationStatus]:
        prefix = actor_name(tag, "")
        answer = self._ask({"do": "watch", "prefix": prefix}, self._answer_s)
        seen: dict[str, AllocationStatus] = {}
        for one in answer["hires"]:
            hire = one["name"].removeprefix(prefix)
            known = seen.get(hire)
            if not hire.startswith("-") and (known is None or known.state == "gone"):
                seen[hire] = self._seen(hire, one, answer["nodes"])
        return list(seen.values())

    def cancel(self, handle: str) -> None:
        grace_s = self.options.grace_s + grace_period.MARGIN_S
        self._ask({"do": "cancel", "name": handle, "grace_s": grace_s}, grace_s + CANCEL_S + self._answer_s)

    def cancel_timeout_s(self, grace_s: float) -> float:
        del grace_s  # `within` has shortened it, if it was longer
        return self.options.grace_s + grace_period.MARGIN_S + CANCEL_S + self._answer_s + self._connect_s

    def capacity(self) -> list[Capacity]:
        return ray_nodes.offers(self.options, self._ask({"do": "offers"}, self._answer_s))

    def close(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.end()

    # --- what is asked

    @property
    def _argv(self) -> tuple[str, ...]:
        return (self.options.client or sys.executable, "-P", str(DRIVER), "--address", self.options.address)

    def _request(self, request: AllocationRequest) -> dict[str, Any]:
        tied = dataclasses.replace(request, options=(*request.options, "--lifeline", LIFELINE))
        tied = grace_period.within(tied, self.options.grace_s + grace_period.MARGIN_S)
        return {
            "do": "submit",
            "name": actor_name(request.tag, request.allocation),
            "options": actor_options(self.options, request.cpus, request.memory_bytes),
            "group": self.options.group,
            "script": agent_script.script(tied, self.options, python=self.options.python or "python3", before=_BEFORE),
        }

    def _seen(self, hire: str, one: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> AllocationStatus:
        if one["state"] == "DEAD":
            self._takes.pop(hire, None)
            unfit = exit_message.of_python(one["why"], self.options.python)
            return AllocationStatus(hire, one["name"], "gone", unfit or brief(one["why"]))
        if one["state"] == "ALIVE":
            why = "Ray drains its node" if one["until"] else ""
            return AllocationStatus(hire, one["name"], "running", why, one["until"])
        return AllocationStatus(
            hire, one["name"], "waiting", ray_nodes.why_waiting(self.options, nodes, self._takes.get(hire))
        )

    # --- how it is asked

    @property
    def _through_client(self) -> bool:
        return self.options.address.startswith("ray://")

    @property
    def _connect_s(self) -> float:
        """For each of its clients, Ray starts a process on the head."""
        return CONNECT_INSIDE_S if self._through_client else CONNECT_S

    @property
    def _answer_s(self) -> float:
        """Through Ray's client, a worker may have to start before anything can be seen."""
        return ANSWER_INSIDE_S if self._through_client else ANSWER_S

    def _ask(self, request: Mapping[str, Any], within_s: float) -> Any:
        link = self._connected()
        try:
            return self._await(link, link.ask(request), within_s)
        except DriverError as failed:
            if failed.kind == "refused":
                raise AllocationRefused("Ray refuses this", where=self._where, why=failed.why) from failed
            self._drop(link)
            raise self._unreachable(failed.why) from failed

    def _connected(self) -> RayDriverClient:
        """One conversation for all threads; whoever comes while it is opened waits with the others."""
        with self._lock:
            if self._link is None or self._link.ended:
                self._probe()
                self._link = self._start()
            link = self._link
        try:
            self._await(link, link.ready, self._connect_s)
        except DriverError as failed:
            self._drop(link)
            raise self._failure(failed) from failed
        return link

    def _await(self, link: RayDriverClient, answer: Future[Any], within_s: float) -> Any:
        """Wait for an answer: not for long if others are late, since then the cluster is away, or the driver hangs.

        When the cluster comes back, a driver that waited for it answers at once, so it is given some time.
        """
        patience_s = within_s if link.late_since is None else min(within_s, LATE_S)
        try:
            return answer.result(patience_s)
        except TimeoutError as error:
            if link.late_for_s() > GIVE_UP_S:
                self._drop(link)
            raise self._unreachable(f"it did not answer within {patience_s:g} s") from error

    def _probe(self) -> None:
        """Ray tries for long to reach what is not there; a socket tells it at once."""
        if self.options.address == "auto":
            return
        place = split_address(self.options.address)
        if place is None:
            raise AllocationRefused(
                f"{self.options.address!r} is no address of a Ray cluster",
                where=f"[pool.{self.pool}] address",
                do="give auto, HOST:6379 (on a node of it) or ray://HOST:10001 (from elsewhere)",
            )
        try:
            socket.create_connection(place, PROBE_S).close()
        except OSError as error:
            raise self._unreachable(str(error)) from error

    def _start(self) -> RayDriverClient:
        try:
            return RayDriverClient(self._argv)
        except OSError as error:
            raise AllocationRefused(
                "the interpreter for Ray cannot be started", where=self._where, why=str(error), do="correct client ="
            ) from error

    def _drop(self, link: RayDriverClient) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
        link.kill()

    def _failure(self, failed: DriverError) -> EngineUnreachable | AllocationRefused:
        """Why there is no conversation: what mends itself is asked again, what does not is said with its remedy."""
        where, why = self._where, failed.why
        if failed.kind == "never started":
            return AllocationRefused(
                "the interpreter for Ray cannot be used", where=where, why=why, do="correct client ="
            )
        if failed.kind == "no ray":
            do = "pip install 'shoal-train[ray]', or let client = name an interpreter that has Ray"
            return AllocationRefused("Ray is not installed here", where=where, why=why, do=do)
        if failed.kind == "version":
            do = "let client = name an interpreter with the cluster's versions of Python and Ray"
            return AllocationRefused("the cluster has another version of Ray or Python", where=where, why=why, do=do)
        if failed.kind == "not a node":
            do = "give address = ray://HOST:10001, which can be reached from outside"
            return AllocationRefused("this machine is not a node of that cluster", where=where, why=why, do=do)
        return self._unreachable(why)

    @property
    def _where(self) -> str:
        return f"[pool.{self.pool}] address {self.options.address}"

    def _unreachable(self, why: str) -> EngineUnreachable:
        do = "start Ray here, or give its address" if self.options.address == "auto" else "check that its head is up"
        return EngineUnreachable("the Ray cluster cannot be reached", where=self._where, why=why, do=do)


# --- pure


def actor_name(tag: str, hire: str) -> str:
    """No name of one tag begins like those of another: hires never begin with a dash."""
    return f"shoal-{tag.replace('-', '--')}-{hire}"


def actor_options(options: RayOptions, cpus: int = 0, memory_bytes: int = 0) -> dict[str, Any]:
    """What Ray is told of the actor; what members need counts where the pool says nothing."""
    some = options.cpus if options.cpus is not None else float(cpus or ray_nodes.CPUS)
    asked: dict[str, Any] = {"num_cpus": some, "num_gpus": options.gpus}
    if memory := options.memory_bytes or memory_bytes:
        asked["memory"] = memory
    if options.resources:
        asked["resources"] = dict(options.resources)
    if options.labels:
        asked["label_selector"] = dict(options.labels)
    if options.image:
        asked["runtime_env"] = {"image_uri": options.image}
    if options.placement == "spread" and not options.group:
        asked["scheduling_strategy"] = "SPREAD"
    return asked


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port; None if it is no address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if "://" in host or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def brief(cause: str) -> str:
    """What Ray says of a death, without what surrounds it: the agent's last words if it had any."""
    text = " ".join(cause.split())
    _, found, words = text.partition("the agent ended with ")
    if found:
        return found + words
    if "its node has died" in text:
        return "its node is lost: " + (text.partition("unexpectedly: ")[2] or text)[:300]
    return text.partition(" Some common causes")[0][:300]
