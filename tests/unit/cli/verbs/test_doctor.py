"""What `shoal doctor` prints."""

from __future__ import annotations

from pathlib import Path

import msgspec
from click.testing import CliRunner

from shoal.cli.verbs import doctor
from shoal.core.membership.events import ScaleRequested
from shoal.core.world import Address
from shoal.doctor.diagnosis import CheckVerdict, ConnectionReport, MachineReport, PoolReport, verdicts
from shoal.store.journal import Journal
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


def test_repair_says_what_it_skips_and_the_journal_opens_again(tmp_path: Path) -> None:
    opened = Journal(tmp_path)
    for number in (1, 2, 3):
        opened.append("r", ScaleRequested(1, number), 5.0)
    opened.close()
    lines = opened.path.read_bytes().splitlines(keepends=True)
    opened.path.write_bytes(lines[0] + b"nonsense\n" + lines[2])
    shown = CliRunner().invoke(doctor.command, ["--repair", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "skipped line 2 (event 2): JSON is malformed" in shown.output
    assert "nonsense" in shown.output
    Journal(tmp_path).close()
    assert "nothing to do" in CliRunner().invoke(doctor.command, ["--repair", str(tmp_path)]).output
