"""What a run is to the script of a member, in any framework."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.session import output_upload
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.training_state import StateCodec, TrainingState, UserState


class BaseRun(ABC):
    """Where the run is, and what the script adds to its state; frameworks add how to train."""

    def __init__(
        self, session: Session | ServedSession | StandaloneSession, name: str, directory: str, codec: StateCodec
    ) -> None:
        self._session = session
        self._keeper = TrainingState(session, name, directory, codec)

    @property
    def step(self) -> int:
        """How many steps have been committed."""
        return self._session.step or 0

    @property
    def world(self) -> int:
        """The number of the world that this member is in."""
        world = self._session.world
        return world.number if world is not None else 0

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def size(self) -> int:
        """How many members the world has."""
        return self._session.size

    @property
    @abstractmethod
    def share(self) -> int:
        """How many samples of the global batch this member has in this step."""

    @property
    def member(self) -> str:
        return self._session.me

    def state(self, name: str, save: Callable[[], Any], load: Callable[[Any], object]) -> None:
        """Make something of the script's own part of the state that joiners and checkpoints carry."""
        self._keeper.parts[f"user:{name}"] = UserState(save, load)

    def _save_once(self, path: str, write: Callable[[], None], looping: bool) -> None:
        """Let exactly one member write a file; in a loop, once for each step in which it is asked to."""
        name = f"{path} at step {self.step}" if looping else path
        if self._session.claim(name):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            write()
            output_upload.bring_back(self._session.environment, path)
            self._session.complete_claim(name)

    def close(self) -> None:
        """Let go of connections; called by itself at the end of the process."""
        self._keeper.close()
        self._session.close()
