"""What an agent has to tell is told in order, and exits are never forgotten."""

from __future__ import annotations

from shoal.agent.outbox import MAX_LOG_BATCHES, Outbox
from shoal.wire.agent_messages import AgentHeartbeatMsg, LogLinesMsg, MemberExitedMsg


def exited(member="lab/0"):
    return MemberExitedMsg("run", member, "one", 0, None, "done")


def lines(*texts, member="lab/0"):
    return LogLinesMsg("run", member, texts)


def drain(outbox, now=0.0):
    found = []
    while (message := outbox.take()) is not None:
        outbox.sent(message, now)
        found.append(message)
    return found


def test_events_go_before_log_lines():
    outbox = Outbox()
    outbox.put(lines("a", member="lab/1"))
    outbox.put(AgentHeartbeatMsg(0.0, 0))
    assert drain(outbox) == [AgentHeartbeatMsg(0.0, 0), lines("a", member="lab/1")]


def test_the_last_words_of_a_member_go_before_its_exit():
    outbox = Outbox()
    outbox.put(lines("other", member="lab/1"))
    outbox.put(lines("a"))
    outbox.put(lines("b"))
    outbox.put(exited())
    assert drain(outbox) == [lines("a"), lines("b"), exited(), lines("other", member="lab/1")]


def test_what_could_not_be_sent_is_the_next_again():
    outbox = Outbox()
    outbox.put(exited())
    outbox.put(exited("lab/1"))
    outbox.put_back(outbox.take())
    assert drain(outbox) == [exited(), exited("lab/1")]


def test_an_exit_told_just_before_the_link_broke_is_told_again():
    outbox = Outbox(tell_again_s=60.0)
    outbox.put(exited())
    outbox.put(exited("lab/1"))
    drain(outbox, now=100.0)
    outbox.put(exited("lab/2"))
    outbox.connection_lost(now=130.0)
    assert drain(outbox, now=130.0) == [exited(), exited("lab/1"), exited("lab/2")]


def test_an_exit_told_long_ago_is_not_told_again():
    outbox = Outbox(tell_again_s=60.0)
    outbox.put(exited())
    drain(outbox, now=100.0)
    outbox.connection_lost(now=161.0)
    assert drain(outbox) == []


def test_log_lines_are_bounded_and_the_loss_is_marked():
    outbox = Outbox()
    for number in range(MAX_LOG_BATCHES + 3):
        outbox.put(lines(str(number)))
    found = drain(outbox)
    assert len(found) == MAX_LOG_BATCHES
    assert found[0].lines == ("… 3 lines were not sent while the coordinator was away", "3")
    assert found[1].lines == ("4",)
