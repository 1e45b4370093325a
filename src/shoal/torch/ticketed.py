"""The training loop underneath a run whose parameters are held by servers: a ticket at a time, at each member's pace.

A trainer gets a ticket from the ledger, pulls the parameters, lets the script compute, and pushes the gradient when the
script calls its optimizer. The optimizer itself, and the schedulers, work on the servers. A server runs the same script
up to its loop, and then serves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.core import sync
from shoal.core.clock import Granted, Ledger, Ticket
from shoal.errors import NotForServers, UnusableBackward
from shoal.torch.memory import is_out_of_memory
from shoal.torch.serve import serve
from shoal.torch.trainer import seed_everything
from shoal.torch.vault import PER_EPOCH, PER_STEP, Layout, gradients_of, take_over
from shoal.wire.messages import Spent
from shoal.worker.data.feed import Feed, IndexedFeed, Piece
from shoal.worker.keeper import StateKeeper
from shoal.worker.loop import seed_of
from shoal.worker.metrics import finite
from shoal.worker.pace import pace_of
from shoal.worker.placed import PlacedSession
from shoal.worker.pushing import Abandoned, Pusher


@dataclass(slots=True)
class TicketTurn:
    """What this member does with one ticket, and how far it has come."""

    granted: Granted
    life: int
    epoch: int
    pieces: list[Piece]
    last_of_epoch: bool
    piece: int = 0
    backwards: int = 0
    weight: float = 0.0
    loss: torch.Tensor | float = 0.0
    committed: bool = False
    abandoned: bool = False
    scheduled: bool = False
    stepped: set[int] = field(default_factory=set)
    given_at: float = 0.0
    seconds: float = 0.0
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0

    @property
    def samples(self) -> int:
        return sum(piece.samples for piece in self.pieces)

    @property
    def last_piece(self) -> bool:
        return self.piece == len(self.pieces) - 1


class TicketTrainer:
    """Does the tickets of one loop; optimizers and schedulers ask it what may happen now."""

    synchronised = False

    def __init__(self, session: PlacedSession, keeper: StateKeeper) -> None:
        self.model: torch.nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.feed: Feed | None = None
        self.turn: TicketTurn | None = None
        self.metrics: dict[str, Any] = {}
        self._session, self._keeper = session, keeper
        self._sync = sync.parse(session.settings.sync)
        self._pusher = Pusher(session) if not session.serves else None
        self._layout: Layout | None = None
        self._versions: dict[int, int] = {}
        self._life = 0
        self._pace = 0
        self._slow = pace_of(session.me, session.settings.emulate)
        self._serving = False
        self._finished = 0
        self._loss: float | None = None
        self._usual_s = 0.0
        self._spent = dict.fromkeys(("data_s", "compute_s", "wait_s", "exchange_s"), 0.0)
        self._samples_per_s = 0.0
        session.status = self._status

    # --- the loop

    def train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        """Yield this member's batches until every ticket is finished; a server never gets beyond this."""
        assert self.model is not None
        if feed.held is not None:
            raise self.unusable("exact mode", "leave exact out")
        if not isinstance(feed, IndexedFeed):
            raise self.unusable("run.stream", "use run.batches over a map-style dataset")
        session, order = self._session, feed.order
        identity = f"{identity};sync={self._sync.text};servers={session.settings.servers}"
        if session.serves:
            self._serving = True
            ledger = Ledger(self._sync.bound, session.settings.tickets)
            raise serve(session, self._keeper, self.model, self.optimizers, self.schedulers, order, ledger, identity)
        feed.start()
        session.begin(identity)
        over = False
        try:
            yield from self._tickets(feed, seed)
            over = True
        finally:
            if not over and sys.exc_info()[0] is GeneratorExit:
                session.quit()
            feed.close()
            assert self._pusher is not None
            self._pusher.close()

    def _tickets(self, feed: IndexedFeed, seed: int) -> Iterator[Any]:
        assert self._pusher is not None
        pusher, session, order = self._pusher, self._session, feed.order
        done: Ticket | None = None
        seconds = 0.0
        while True:
            if session.stop is not None or session.leaving:
                self._go(done, seconds)
            try:
                session.phase("ticket")
                life = pusher.wait_for_servers().life
                asked_at = time.perf_counter()
                answer = pusher.turn(done, seconds)
                done = None
                wait_s = time.perf_counter() - asked_at
                self._pull(life)
                exchange_s = time.perf_counter() - asked_at - wait_s
            except Abandoned:
                done = None
                continue
            self._finished = answer.finished_samples if answer.granted is None else answer.granted.finished_samples
            session.step = order.steps_within(self._finished)
            if answer.granted is None:
                session.done(session.step)
                return
            self._open(feed, answer.granted, life, wait_s, exchange_s)
            yield from self._give_out(seed)
            turn = self.turn
            if turn is not None and turn.committed:
                done, seconds = turn.granted.ticket, turn.seconds

    def _go(self, done: Ticket | None, seconds: float) -> None:
        """We were told to go: what is finished is said, and then we go."""
        assert self._pusher is not None
        try:
            if done is not None:
                self._pusher.turn(done, seconds, wants=False)
        except Abandoned:
            pass
        self._pusher.bye()
        self._session.raise_if_over()

    def _pull(self, life: int) -> None:
        assert self.model is not None
        assert self._pusher is not None
        placement = self._pusher.wait_for_servers()
        if placement.life != life:
            raise Abandoned("the state went back to a checkpoint")
        if self._layout is None:
            self._layout = Layout(self.model, len(placement.holdings))
        if life != self._life:
            self._life, self._versions = life, {}
        self._session.phase("pull")
        for part, (version, body) in self._pusher.pull(self._versions).items():
            if body is not None:
                take_over(self._layout, part, body)
            self._versions[part] = version

    def _open(self, feed: IndexedFeed, granted: Granted, life: int, wait_s: float, exchange_s: float) -> None:
        """Read the data of a ticket."""
        ticket, order = granted.ticket, feed.order
        self._session.phase("data")
        began = time.perf_counter()
        if self._slow is not None:
            self._slow.begin(ticket.step)
        pieces = feed.cut(ticket.step, ticket.start, ticket.stop)
        cursor = order.cursor(ticket.step)
        last = cursor.index == order.steps_per_epoch - 1 and ticket.stop == order.size_of(ticket.step)
        turn = self.turn = TicketTurn(granted, life, cursor.epoch, pieces, last, given_at=began)
        turn.wait_s, turn.exchange_s, turn.data_s = wait_s, exchange_s, time.perf_counter() - began

    def _give_out(self, seed: int) -> Iterator[Any]:
        """Give the loop's body the pieces of a ticket."""
        turn = self.turn
        assert turn is not None
        ticket, pieces = turn.granted.ticket, turn.pieces
        seed_everything(seed_of(seed, ticket.step, ticket.start))
        self._session.phase("compute")
        for number, piece in enumerate(pieces):
            turn.piece = number
            yield piece.batch
            if turn.abandoned:
                break
            if turn.backwards <= number:
                raise UnusableBackward(
                    f"a batch of step {ticket.step} ended without run.backward",
                    do="call run.backward(loss) for every batch",
                )
        if not turn.committed and not turn.abandoned:
            raise UnusableBackward(
                f"a batch of step {ticket.step} ended without optimizer.step", do="call optimizer.step() every time"
            )
        if turn.abandoned:
            self._clear()
        self._learn_pace(turn)

    def _learn_pace(self, turn: TicketTurn) -> None:
        """How the script calls its schedulers, as its batches show."""
        if turn.scheduled:
            self._pace = PER_STEP if not turn.last_of_epoch else self._pace or PER_EPOCH

    def _clear(self) -> None:
        assert self.model is not None
        for parameter in self.model.parameters():
            parameter.grad = None

    # --- one ticket

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """See `Run.backward`; the gradient is that of this member's batch."""
        turn = self.turn
        if turn is None:
            raise UnusableBackward("run.backward was called outside the training loop", do="call it in run.batches")
        if turn.backwards > turn.piece:
            raise UnusableBackward(
                "run.backward was called twice for one batch", do="add the losses, then call it once"
            )
        if turn.backwards == 0:
            self._clear()
        turn.backwards += 1
        if turn.abandoned:
            return
        samples = turn.pieces[turn.piece].samples
        own = float(samples if weight is None else weight)
        turn.weight += own
        turn.loss = turn.loss + loss.detach() * own
        if turn.last_piece and self._slow is not None:
            self._slow.before_exchange(turn.samples, samples)
        try:
            (loss * own).backward()  # type: ignore[no-untyped-call]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.too_large(error)
            return
        if turn.last_piece:
            self._complete(turn)

    def _complete(self, turn: TicketTurn) -> None:
        """All pieces are summed up: make it the mean."""
        assert self.model is not None
        for parameter in self.model.parameters():
            if parameter.grad is not None and turn.weight > 0:
                parameter.grad.div_(turn.weight)
        if self._slow is not None:
            self._slow.after_backward()

    # --- what a model asks that does not fit (see shoal.torch.memory)

    @property
    def piece_samples(self) -> int:
        turn = self.turn
        return turn.pieces[turn.piece].samples if turn is not None and not turn.committed else 0

    def too_large(self, error: BaseException) -> None:
        """The ledger gives the same ticket again to whoever holds it; it then comes in smaller pieces."""
        turn = self.turn
        if turn is None or self.feed is None or not self.feed.shrink(turn.pieces[turn.piece].samples):
            raise error
        turn.abandoned = True

    # --- what guards ask (see shoal.torch.guard)

    @property
    def committed(self) -> bool:
        return self.turn is not None and self.turn.committed

    @property
    def applied(self) -> bool:
        return self.committed

    def schedules(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ARG002
        """Schedulers step on the servers; that the script wanted its to is noted here."""
        if args or kwargs:
            raise self.unusable("a schedule that needs a metric", "use one that counts steps or epochs")
        if not self._serving and self.turn is not None and self.turn.committed:
            self.turn.scheduled = True
        return int(self._serving)

    @property
    def has_gradient(self) -> bool:
        return self.turn is not None and self.turn.backwards > 0

    @property
    def accumulating(self) -> bool:
        turn = self.turn
        return turn is not None and turn.backwards > 0 and not turn.committed and not turn.abandoned

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """On a server, step; on a trainer, push the gradient when the last optimizer is asked to step."""
        if self._serving:
            return real()
        turn = self.turn
        if turn is None or turn.abandoned or not turn.last_piece:
            return None
        if turn.committed:
            raise UnusableBackward("optimizer.step was called twice in one step", do="call it once for each batch")
        if turn.backwards <= turn.piece:
            raise UnusableBackward("optimizer.step came before run.backward", do="call run.backward(loss) first")
        turn.stepped.add(id(optimizer))
        if len(turn.stepped) == len(self.optimizers):
            self._push(turn)
        return None

    def apply_all(self, real: Callable[[], Any]) -> Any:  # noqa: ARG002
        self.refuse_scaler()

    def refuse_scaler(self) -> None:
        raise self.unusable("GradScaler", "train in bfloat16, which needs no scaler")

    def unusable(self, what: str, do: str) -> NotForServers:
        return NotForServers(
            f"{what} cannot be used with --sync {self._sync.text}",
            why="servers apply gradients part by part as they arrive, and no process has all of a step's",
            do=f"{do}, or use --sync step",
        )

    def _push(self, turn: TicketTurn) -> None:
        assert self._pusher is not None
        assert self._layout is not None
        turn.seconds = time.perf_counter() - turn.given_at
        turn.compute_s = turn.seconds - turn.data_s
        self._session.phase("push")
        gradients = {part: gradients_of(self._layout, part, turn.weight, self._pace) for part in self._layout.parts}
        try:
            self._pusher.push(turn.granted, turn.life, gradients)
        except Abandoned:
            turn.abandoned = True
            return
        turn.committed = True
        self._measure(turn)

    def _measure(self, turn: TicketTurn) -> None:
        pushed_s = time.perf_counter() - turn.given_at - turn.seconds
        turn.exchange_s += pushed_s
        took_s = max(turn.wait_s + turn.exchange_s + turn.seconds, 1e-9)
        smooth = 0.9 if self._usual_s else 0.0
        self._usual_s = smooth * self._usual_s + (1 - smooth) * took_s
        for name in self._spent:
            self._spent[name] = smooth * self._spent[name] + (1 - smooth) * getattr(turn, name)
        self._samples_per_s = smooth * self._samples_per_s + (1 - smooth) * turn.samples / took_s
        self._loss = float(turn.loss) / turn.weight if turn.weight else self._loss

    def _status(self) -> dict[str, Any]:
        turn, feed = self.turn, self.feed
        pusher = self._pusher
        return {
            "usual_step_s": self._usual_s,
            "epoch": turn.epoch if turn is not None else 0,
            "total_steps": feed.total if feed is not None else None,
            "share": turn.samples if turn is not None else 0,
            "loss": self._loss,
            "samples_per_s": self._samples_per_s,
            "metrics": finite(self.metrics),
            "spent": Spent(**self._spent),
            "clock": turn.granted.clock if turn is not None else 0,
            "ahead": turn.granted.clock - turn.granted.low if turn is not None else 0,
            "waits_for": pusher.waits_for if pusher is not None else (),
        }
