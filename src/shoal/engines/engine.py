"""Engine interface: starts agents on machines, reports on them, and stops them.

An *allocation* is one agent requested from an engine. It is known by its name, which is also the agent's name in every
run ("lab-3"), and by the tag of the coordinator that requested it. An engine turns allocations into whatever its
cluster calls them: a process, a batch job, an actor. What the cluster calls it is the allocation's *handle*.

The life of an allocation::

    render(request)      what would be handed to the cluster; pure, and free of secrets, so `--dry-run` can print it
    submit(request)      hand it over; returns the handle
    watch(tag)           list the allocations of a coordinator: waiting → running → gone
    cancel(handle)       SIGTERM, the grace period, SIGKILL; returns when nothing of it is left

Two rules make this survive crashes on either side.

*Found again by tag.* Engines keep no record of their own on the coordinator's machine. Whatever they start carries the
tag in a place that outlives the coordinator: a directory, a job name, an actor name. So a restarted coordinator lists
what its predecessor requested, adopts what it still wants and cancels the rest. In-memory state is only a cache.

*Nothing is requested twice.* `submit` is idempotent: if an allocation of this tag and name exists, waiting or running,
its handle is returned and nothing is started. Where the reply to a submission may have been lost, the engine has to
find out whether it took effect before it starts the allocation anywhere else: a second agent of one name is worse than
a late one. `cancel` is idempotent too: an allocation that does not exist counts as cancelled.

Failures come in two kinds. `EngineUnreachable` means "not now": the coordinator tries again, and must not conclude that
allocations have ended. `AllocationRefused` means "never, as requested": a wrong partition, a host that rejects the key.
A `watch` that returns normally is a complete answer; an allocation that is missing from it has ended.

Each allocation owns a directory on its machine, `allocations/TAG/NAME`, with its token, its log and the project files
(`agent_script`). A token in it means that the agent may be alive; a directory without one may be removed after a day
(`stale_dirs`).

The conformance suite in `shoal.testing.engine_conformance` checks all of this against real agents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec

from shoal.pack.environments.recipe import PublishedEnvironment
from shoal.wire.credentials import Credentials


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """Request for one agent.

    `url` is the coordinator's address, or several separated by commas; `options` are passed to the agent. `cpus` and
    `memory_bytes` are the sum over its members, 0 if unspecified; sizes configured in the pool take precedence.
    `environment` is built on the machine before the agent starts, if it is given.
    """

    allocation: str
    tag: str
    url: str
    credentials: Credentials
    slots: int | None = None
    options: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    environment: PublishedEnvironment | None = None


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """Command that `submit` would run, with its standard input. Contains no secret."""

    argv: tuple[str, ...]
    text: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllocationStatus:
    """State of an allocation as the engine reports it.

    `handle` is the engine's own name for it, and the argument of `cancel`. `why` says what it waits for or how it
    ended; `ends_at` is when the engine will end it, in seconds since the epoch, if that is known.
    """

    allocation: str
    handle: str
    state: Literal["waiting", "running", "gone"]
    why: str = ""
    ends_at: float | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Machines of one kind that could be allocated now; `count` is None if unknown, `why` says what limits it."""

    kind: str
    count: int | None
    cpus: int = 0
    gpus: int = 0
    memory_bytes: int = 0
    why: str = ""


# Time beyond the grace period for one `cancel`: the calls to the engine, and SIGKILL for what is left.
CANCEL_S = 60.0


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options that every engine accepts in a `[pool.NAME]` of shoal.toml.

    `python` is an interpreter on the machines that has Shoal installed; with `environment`, any interpreter will do: it
    builds the environment there once, and that includes Shoal. `image` is the container image, for engines that run
    containers. `setup` are shell lines to run first. `directory` is where agents keep tokens, logs and project files.
    `shared` says whether the machines see the disk of the machine that starts runs, so that nothing has to be sent;
    unset, each engine has its own default.
    """

    python: str = ""
    environment: str = ""
    image: str = ""
    setup: tuple[str, ...] = ()
    directory: str = ""
    shared: bool | None = None


class Engine(ABC):
    """Engine of one pool. Every method but `render` may block, and is called from several threads.

    `sized` says that the engine can request processors and memory; `takes_images` that it can run containers.
    """

    options_type: ClassVar[type[EngineOptions]] = EngineOptions
    shared_by_default: ClassVar[bool] = False
    sized: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False

    def __init__(self, pool: str, options: EngineOptions) -> None:
        self.pool, self.options = pool, options

    @property
    def max_allocations(self) -> int | None:
        """Upper limit of simultaneous allocations; None if unknown."""
        return None

    @property
    def size(self) -> tuple[int, int]:
        """Processors and bytes of memory per allocation as the pool configures them; 0 where it does not."""
        return 0, 0

    @property
    def shared(self) -> bool:
        """Whether the machines see the disk of the machine that starts runs."""
        default = self.shared_by_default and not self.options.image
        return default if self.options.shared is None else self.options.shared

    @abstractmethod
    def render(self, request: AllocationRequest) -> RenderedRequest:
        """Return what `submit` would hand to the engine; pure."""

    @abstractmethod
    def submit(self, request: AllocationRequest) -> str:
        """Start an agent, or queue a request for a machine; return the handle. Does nothing if it already exists."""

    @abstractmethod
    def watch(self, tag: str) -> list[AllocationStatus]:
        """Return every allocation with this tag, whichever process submitted it; ended ones may be left out."""

    @abstractmethod
    def cancel(self, handle: str) -> None:
        """Stop an allocation and everything it started; return at once if it does not exist."""

    def cancel_timeout_s(self, grace_s: float) -> float:
        """Return the longest time that `cancel` may take, given the agents' grace period."""
        return grace_s + CANCEL_S

    @abstractmethod
    def capacity(self) -> list[Capacity]:
        """Return what could be allocated now, one entry per kind of machine."""

    def clean_up(self, tag: str, active: Collection[str]) -> None:  # noqa: B027 - not every engine reaches the disks
        """Remove directories of allocations that ended more than `agent_script.KEEP_S` ago, of any coordinator.

        `active` are the allocations of this tag to keep in any case.
        """

    def close(self) -> None:  # noqa: B027 - most engines hold no connection
        """Close connections; allocations keep running."""


def agent_options(common: tuple[str, ...], engine: Engine) -> tuple[str, ...]:
    """Return the agent's options on this engine: `common`, and `--apart` where the disk is not shared."""
    return common if engine.shared else (*common, "--apart")
