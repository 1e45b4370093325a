"""Messages of an agent leave in order, and exits are never lost."""

from __future__ import annotations

from shoal.agent.outbox import MAX_LOG_BATCHES, Outbox
from shoal.wire.agent_messages import AgentHeartbeatMsg, LogLinesMsg, MemberExitedMsg


def exited(member="lab/0"):
    return MemberExitedMsg("run", member, "i1", 0, None, "done")


def lines(*texts, member="lab/0"):
    return LogLinesMsg("run", member, texts)


def drain(outbox, now=0.0):
    messages = []
    while (message := outbox.take()) is not None:
        outbox.sent(message, now)
        messages.append(message)
    return messages


def test_events_precede_log_lines():
    outbox = Outbox()
    outbox.put(lines("a", member="lab/1"))
    outbox.put(AgentHeartbeatMsg(0.0, 0))
    assert drain(outbox) == [AgentHeartbeatMsg(0.0, 0), lines("a", member="lab/1")]


def test_log_lines_of_a_member_precede_its_exit():
    outbox = Outbox()
    outbox.put(lines("other", member="lab/1"))
    outbox.put(lines("a"))
    outbox.put(lines("b"))
    outbox.put(exited())
    assert drain(outbox) == [lines("a"), lines("b"), exited(), lines("other", member="lab/1")]


def test_unsent_message_is_the_next_again():
    outbox = Outbox()
    outbox.put(exited())
    outbox.put(exited("lab/1"))
    outbox.put_back(outbox.take())
    assert drain(outbox) == [exited(), exited("lab/1")]


def test_exit_sent_just_before_the_connection_broke_is_sent_again():
    outbox = Outbox(resend_s=60.0)
    outbox.put(exited())
    outbox.put(exited("lab/1"))
    drain(outbox, now=100.0)
    outbox.put(exited("lab/2"))
    outbox.connection_lost(now=130.0)
    assert drain(outbox, now=130.0) == [exited(), exited("lab/1"), exited("lab/2")]


def test_exit_sent_long_ago_is_not_sent_again():
    outbox = Outbox(resend_s=60.0)
    outbox.put(exited())
    drain(outbox, now=100.0)
    outbox.connection_lost(now=161.0)
    assert drain(outbox) == []


def test_log_lines_are_bounded_and_the_loss_is_marked():
    outbox = Outbox()
    for number in range(MAX_LOG_BATCHES + 3):
        outbox.put(lines(str(number)))
    messages = drain(outbox)
    assert len(messages) == MAX_LOG_BATCHES
    assert messages[0].lines == ("… 3 lines not sent while the coordinator was away", "3")
    assert messages[1].lines == ("4",)
