"""What `shoal doctor` prints."""

from __future__ import annotations

import msgspec

from shoal.cli.verbs import doctor
from shoal.core.world import Address
from shoal.doctor.diagnosis import CheckVerdict, ConnectionReport, MachineReport, PoolReport, verdicts
from shoal.wire.machine_check import ConnectAttempt, MachineFacts

GB = 1 << 30


def machine(agent: str) -> MachineReport:
    listens = (Address("10.0.0.1", 20000),)
    facts = MachineFacts(agent, "3.11.7", "Linux", 4, (), 16 * GB, 90 * GB, {"torch": "2.9.0"}, listens, (0.0002,))
    return MachineReport(agent, "lab", "https://10.0.0.9:29300", facts)


def test_report_is_a_table_with_remedies():
    refused = ConnectionReport("lab-1", "lab-2", (ConnectAttempt("10.0.0.2", 20000, "refused", "no"),))
    fast = ConnectionReport("lab-2", "lab-1", (ConnectAttempt("10.0.0.1", 20000, round_trip_s=1e-4, bytes_per_s=1e9),))
    report = PoolReport((machine("lab-1"), machine("lab-2")), (refused, fast), (), ())
    shown = doctor.report_text(msgspec.structs.replace(report, verdicts=verdicts(report)))
    assert "NOT REACHED" in shown
    assert "100 µs   1000 MB/s" in shown
    assert "do: a firewall rejects it" in shown


def test_report_without_problems_says_so():
    assert doctor.report_text(PoolReport((), (), (), ())) == "no problems: all machines reach each other"


def test_remedy_of_a_good_verdict_is_not_shown():
    lines = doctor.verdict_lines([CheckVerdict("good", "ports", "3 of 3 free", "choose another range")])
    assert lines == "ok    ports          3 of 3 free"
