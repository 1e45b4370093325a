"""What an engine is: it starts agents on machines, says what became of them, and ends them.

A *hire* is one agent that was asked of an engine. It has a name, which is the agent's in all runs, and the tag of the
coordinator whose it is. Engines keep no memory of their own: whatever they started can be found again by its tag, so
that a coordinator that comes back finds what it had asked for, and what nobody knows of can be ended.
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
    """One agent to be started. `url` is the coordinator's, or several with commas; `options` are the agent's own.

    `cpus` and `memory_bytes` are what its members need together, 0 if nobody said; a pool that says it itself is right.
    `environment` is what it is to run in, if that has to be made there first.
    """

    hire: str
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
    """What would be handed to the engine: a command, and what is written to it. It holds no secret."""

    argv: tuple[str, ...]
    text: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllocationStatus:
    """A hire as the engine knows it. `why` says what it waits for, or how it ended; `until` when it will be ended.

    `handle` is what the engine calls it, and what it is cancelled by.
    """

    hire: str
    handle: str
    state: Literal["waiting", "running", "gone"]
    why: str = ""
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What could be had now, of one kind of machine: how many, None if nobody knows; `why` says what limits it."""

    kind: str
    count: int | None
    cpus: int = 0
    gpus: int = 0
    memory_bytes: int = 0
    why: str = ""


# What a call to an engine, and the end of what is left after the grace, may take.
CANCEL_S = 60.0


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every engine can be told of a pool in shoal.toml: the interpreter there, shell lines before it, a directory.

    `python` is one that has Shoal; `directory` is where agents keep tokens, logs and what they are sent; `shared` says
    whether machines see the disk of who starts runs, so that nothing has to be sent: without it, the engine knows.
    With an `environment`, any `python` will do: it makes the environment there once, which has Shoal. `image` is what
    the agent's container is made of, for engines that have containers.
    """

    python: str = ""
    environment: str = ""
    image: str = ""
    setup: tuple[str, ...] = ()
    directory: str = ""
    shared: bool | None = None


class Engine(ABC):
    """One pool's engine. All but `render` may wait for others, and is called from threads.

    Whatever cannot be reached just now raises EngineUnreachable, and is asked again; what the engine will never do as
    it was asked raises HireRefused. `sized` says that it can ask for processors and memory.
    """

    options_type: ClassVar[type[EngineOptions]] = EngineOptions
    usually_shared: ClassVar[bool] = False
    sized: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False

    def __init__(self, pool: str, options: EngineOptions) -> None:
        self.pool, self.options = pool, options

    @property
    def most(self) -> int | None:
        """How many hires there can be at a time at the very most; None if nobody knows."""
        return None

    @property
    def size(self) -> tuple[int, int]:
        """Processors and bytes of memory of each hire, as the pool itself says; 0 if it does not."""
        return 0, 0

    @property
    def shared(self) -> bool:
        """Whether machines see the disk of who starts runs."""
        usually = self.usually_shared and not self.options.image
        return usually if self.options.shared is None else self.options.shared

    @abstractmethod
    def render(self, ask: AllocationRequest) -> RenderedRequest:
        """What `submit` would hand to the engine; pure."""

    @abstractmethod
    def submit(self, ask: AllocationRequest) -> str:
        """Start an agent, or ask for a machine to start it on; its handle. What is there is not started twice."""

    @abstractmethod
    def watch(self, tag: str) -> list[AllocationStatus]:
        """Everything that has this tag, whoever submitted it; those that ended may be left out."""

    @abstractmethod
    def cancel(self, handle: str) -> None:
        """End a hire, and all that it started; one that is not there is as good as ended."""

    def leave_s(self, grace_s: float) -> float:
        """How long `cancel` may take at the very most, if agents have so long to hand over."""
        return grace_s + CANCEL_S

    @abstractmethod
    def offers(self) -> list[Capacity]:
        """What could be had now, one for each kind of machine."""

    def tidy(self, tag: str, known: Collection[str]) -> None:  # noqa: B027 - not all can reach what hires leave
        """Remove what was left by hires that ended a while ago (`boot.KEEP_S`), also those of other coordinators.

        `known` are the hires of this tag that somebody counts on.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of connections; hires live on."""


def agent_options(common: tuple[str, ...], engine: Engine) -> tuple[str, ...]:
    """The options of agents on machines of an engine: those of all, and whether they see our disk."""
    return common if engine.shared else (*common, "--apart")
