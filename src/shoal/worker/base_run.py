"""Base of the public `Run` objects: what a script can ask of its run in any framework."""

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
    """This member's view of the run, and the script's additions to its state; frameworks add how to train."""

    def __init__(
        self, session: Session | ServedSession | StandaloneSession, name: str, directory: str, codec: StateCodec
    ) -> None:
        self._session = session
        self._training_state = TrainingState(session, name, directory, codec)

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._session.step or 0

    @property
    def world(self) -> int:
        """Number of the world that this member is in, 0 if it is in none."""
        world = self._session.world
        return world.number if world is not None else 0

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def size(self) -> int:
        """Number of members in this world."""
        return self._session.size

    @property
    @abstractmethod
    def share(self) -> int:
        """Number of samples that this member computes of the current global batch."""

    @property
    def member(self) -> str:
        return self._session.me

    def state(self, name: str, save: Callable[[], Any], load: Callable[[Any], object]) -> None:
        """Add something of the script's own to the state that joining members and checkpoints receive."""
        self._training_state.parts[f"user:{name}"] = UserState(save, load)

    def _save_once(self, path: str, write: Callable[[], None], looping: bool) -> None:
        """Let exactly one member write a file: once per run, or inside a loop once per step."""
        name = f"{path} at step {self.step}" if looping else path
        if self._session.claim(name):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            write()
            output_upload.upload_output(self._session.environment, path)
            self._session.complete_claim(name)

    def close(self) -> None:
        """Close all connections; called automatically when the process ends."""
        self._training_state.close()
        self._session.close()
