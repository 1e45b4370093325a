"""Tickets and clocks: who may begin what, and waits_for one waits for."""

from __future__ import annotations

from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server import ticket_ledger
from shoal.core.parameter_server.ticket_ledger import (
    Ticket,
    TicketDelayed,
    TicketGranted,
    TicketLedger,
    TicketsExhausted,
    TrainerUnknown,
)

ORDER = SampleOrder(samples=100, size=20, epochs=2)


def begin(ledger: TicketLedger, name: str, done: Ticket | None = None, seconds: float = 1.0):
    ledger = ticket_ledger.join(ledger, name, "1")
    return ticket_ledger.advance(ledger, ORDER, name, "1", done, seconds, wants=True)


def finish(ledger: TicketLedger, name: str) -> TicketLedger:
    held = ledger.trainers[name].ticket
    assert held is not None
    ledger, _ = ticket_ledger.advance(ledger, ORDER, name, "1", held, 1.0, wants=False)
    return ledger


def test_lone_trainer_gets_whole_batches_in_order() -> None:
    ledger, seen = TicketLedger(bound=0), []
    ledger, outcome = begin(ledger, "a")
    while isinstance(outcome, TicketGranted):
        seen.append(outcome.ticket)
        ledger, outcome = begin(ledger, "a", outcome.ticket)
    assert seen == [Ticket(step, 0, 20) for step in range(10)]
    assert outcome == TicketsExhausted(200)


def test_two_trainers_share_a_batch() -> None:
    ledger, first = begin(ticket_ledger.join(TicketLedger(bound=0), "b", "1"), "a")
    ledger, second = begin(ledger, "b")
    assert (first.ticket, second.ticket) == (Ticket(0, 0, 10), Ticket(0, 10, 20))


def test_trainer_too_far_ahead_waits_for_named_trainers() -> None:
    ledger = ticket_ledger.join(TicketLedger(bound=1), "b", "1")
    ledger, _ = begin(ledger, "b")
    for _ in range(2):
        ledger, outcome = begin(ledger, "a")
        assert isinstance(outcome, TicketGranted)
        ledger = finish(ledger, "a")
    ledger, outcome = begin(ledger, "a")
    assert isinstance(outcome, TicketDelayed)
    assert outcome.waits_for == ("b",)
    assert outcome.reason == "2 tickets ahead of b, and 1 are allowed"
    ledger, outcome = begin(finish(ledger, "b"), "a")
    assert isinstance(outcome, TicketGranted)


def test_no_trainer_waits_without_a_bound() -> None:
    ledger, _ = begin(ticket_ledger.join(TicketLedger(bound=None), "b", "1"), "b")
    for _ in range(8):
        ledger, outcome = begin(ledger, "a")
        assert isinstance(outcome, TicketGranted)
        ledger = finish(ledger, "a")


def test_ticket_of_a_lost_trainer_is_issued_again() -> None:
    ledger, lost = begin(ticket_ledger.join(TicketLedger(bound=0), "b", "1"), "b")
    ledger, _ = begin(ledger, "a")
    ledger = finish(ledger, "a")
    _, outcome = begin(ledger, "a")
    assert isinstance(outcome, TicketDelayed)
    ledger, outcome = begin(ticket_ledger.remove(ledger, "b", "1"), "a")
    assert isinstance(outcome, TicketGranted)
    assert outcome.ticket == lost.ticket


def test_joiner_starts_at_the_slowest_clock() -> None:
    ledger, _ = begin(TicketLedger(bound=5), "a")
    ledger = finish(ledger, "a")
    ledger = ticket_ledger.join(ledger, "b", "1")
    assert ledger.trainers["b"].clock == 1


def test_joiner_after_all_were_lost_starts_at_their_clock() -> None:
    ledger, _ = begin(TicketLedger(bound=5), "a")
    ledger = ticket_ledger.remove(finish(ledger, "a"), "a", "1")
    assert ticket_ledger.join(ledger, "b", "1").trainers["b"].clock == 1


def test_repeated_request_gets_the_same_ticket() -> None:
    ledger, first = begin(TicketLedger(bound=0), "a")
    same, again = begin(ledger, "a")
    assert again == first
    assert same == ledger


def test_ticket_reported_twice_counts_once() -> None:
    ledger, granted = begin(TicketLedger(bound=0), "a")
    ledger = finish(ledger, "a")
    again, _ = ticket_ledger.advance(ledger, ORDER, "a", "1", granted.ticket, 1.0, wants=False)
    assert again == ledger
    assert again.finished_samples == 20


def test_another_session_of_the_same_name_is_a_joiner() -> None:
    ledger, granted = begin(TicketLedger(bound=0), "a")
    ledger = ticket_ledger.join(ledger, "a", "2")
    assert ledger.returned == (granted.ticket,)
    ledger, outcome = ticket_ledger.advance(ledger, ORDER, "a", "1", None, 0.0, wants=True)
    assert outcome == TrainerUnknown()


def test_ticket_finished_by_a_lost_trainer_is_not_issued_again() -> None:
    ledger, granted = begin(TicketLedger(bound=0), "a")
    ledger = ticket_ledger.remove(ledger, "a", "1")
    ledger, _ = ticket_ledger.advance(
        ticket_ledger.join(ledger, "a", "1"), ORDER, "a", "1", granted.ticket, 1.0, wants=False
    )
    assert ledger.returned == ()
    assert ledger.finished_samples == 20


def test_slow_trainers_get_smaller_tickets() -> None:
    ledger = TicketLedger(bound=None)
    ledger, fast = begin(ticket_ledger.join(ledger, "slow", "1"), "fast")
    ledger, slow = begin(ledger, "slow")
    ledger, _ = ticket_ledger.advance(ledger, ORDER, "fast", "1", fast.ticket, 1.0, wants=False)
    ledger, _ = ticket_ledger.advance(ledger, ORDER, "slow", "1", slow.ticket, 4.0, wants=False)
    assert (ticket_ledger.ticket_size(ledger, "fast", 20), ticket_ledger.ticket_size(ledger, "slow", 20)) == (16, 4)


def test_staleness_policy_gives_less_to_a_trainer_that_is_behind() -> None:
    ledger = ticket_ledger.join(ticket_ledger.join(TicketLedger(bound=None, policy="staleness"), "a", "1"), "b", "1")
    for _ in range(5):
        ledger, _ = begin(ledger, "a")
        ledger = finish(ledger, "a")
    assert ticket_ledger.ticket_size(ledger, "a", 20) > ticket_ledger.ticket_size(ledger, "b", 20)


def test_last_tickets_are_waited_for() -> None:
    ledger, _ = begin(ticket_ledger.join(TicketLedger(bound=None, step=9, at=10), "b", "1"), "b")
    ledger, outcome = begin(ledger, "a")
    assert isinstance(outcome, TicketDelayed)
    assert outcome.waits_for == ("b",)
    ledger, outcome = begin(ticket_ledger.remove(ledger, "b", "1"), "a")
    assert isinstance(outcome, TicketGranted)


def test_restored_checkpoint_issues_open_tickets_again() -> None:
    ledger, first = begin(ticket_ledger.join(TicketLedger(bound=None), "b", "1"), "a")
    ledger, second = begin(ledger, "b")
    ledger = ticket_ledger.begin_checkpoint(finish(ledger, "b"))
    ledger, third = begin(ledger, "b")
    ledger = finish(finish(ledger, "a"), "b")
    saved = ticket_ledger.at_checkpoint(ledger)
    assert saved.returned == (first.ticket, third.ticket)
    assert saved.finished_samples == second.ticket.samples
    assert (saved.step, saved.at) == (ledger.step, ledger.at)
    assert not saved.trainers
