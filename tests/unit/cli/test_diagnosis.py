"""What was found between machines of pools, what it means, and the remedy."""

from __future__ import annotations

from shoal.cli.verbs import checkup
from shoal.core.world import Address
from shoal.doctor.diagnosis import ConnectionReport, MachineReport, MissingMachine, PoolReport, verdicts
from shoal.wire.machine_check import ConnectAttempt, MachineFacts

GB = 1 << 30


def machine(
    agent: str, *, disk: int = 90 * GB, python: str = "3.11.7", torch: str = "2.9.0", skew_s: float = 0.0
) -> MachineReport:
    listens = (Address(f"10.0.0.{agent[-1]}", 20000),)
    versions = {"shoal": "0.1.0", **({"torch": torch} if torch else {})}
    facts = MachineFacts(agent, python, "Linux x86_64", 4, (), 16 * GB, disk, versions, listens, (0.0002,))
    return MachineReport(agent, "lab", "https://10.0.0.9:29300", facts, skew_s, 0.01)


def good(here: str, there: str, bytes_per_s: float = 1e9) -> ConnectionReport:
    return ConnectionReport(
        here, there, (ConnectAttempt(f"10.0.0.{there[-1]}", 20000, round_trip_s=1e-4, bytes_per_s=bytes_per_s),)
    )


def bad(here: str, there: str, *causes: str) -> ConnectionReport:
    return ConnectionReport(
        here, there, tuple(ConnectAttempt(f"10.0.{i}.3", 20000, cause, "no") for i, cause in enumerate(causes))
    )


def report(
    *machines: MachineReport,
    pairs: tuple[ConnectionReport, ...] = (),
    missing: tuple[MissingMachine, ...] = (),
    ports: str = "",
) -> PoolReport:
    return PoolReport(machines, pairs, missing, ("https://10.0.0.9:29300",), ports)


A, B = machine("lab-1"), machine("lab-2")


def test_machines_that_reach_each_other_are_well():
    found = verdicts(report(A, B, pairs=(good("lab-1", "lab-2"), good("lab-2", "lab-1"))))
    assert {one.verdict for one in found} == {"good"}


def test_a_port_that_is_dropped_is_named_with_both_machines_and_what_to_open():
    found = verdicts(report(A, B, pairs=(good("lab-2", "lab-1"), bad("lab-1", "lab-2", "silent")), ports="20000-20100"))
    assert found[0].verdict == "bad"
    assert found[0].what == "lab-1 → lab-2"
    assert "10.0.0.3:20000" in found[0].found
    assert "open TCP 20000-20100 between the machines" in found[0].do


def test_an_address_that_both_have_is_not_taken_for_a_firewall():
    (found,) = [one for one in verdicts(report(A, B, pairs=(bad("lab-1", "lab-2", "somebody else"),))) if one.do]
    assert "interface" in found.do
    (found,) = [one for one in verdicts(report(A, B, pairs=(bad("lab-1", "lab-2", "no route", "no route"),))) if one.do]
    assert "networks" in found.do


def test_one_address_that_works_is_enough():
    attempts = (ConnectAttempt("172.17.0.1", 20000, "somebody else", "no"), *good("lab-1", "lab-2").attempts)
    assert verdicts(report(A, B, pairs=(ConnectionReport("lab-1", "lab-2", attempts),)))[0].verdict == "good"


def test_a_port_of_the_range_that_is_closed_is_named_though_another_is_open():
    pair = ConnectionReport(
        "lab-1", "lab-2", (*good("lab-1", "lab-2").attempts, ConnectAttempt("10.0.0.2", 20100, "silent", "no"))
    )
    found = verdicts(report(A, B, pairs=(pair,), ports="20000-20100"))
    assert "10.0.0.2:20100" in found[0].found
    assert found[0].verdict == "bad"


def test_a_slow_link_is_a_warning():
    found = verdicts(report(A, B, pairs=(good("lab-1", "lab-2", bytes_per_s=1e6),)))
    assert found[0].verdict == "warning"


def test_who_did_not_come_and_who_did_not_find_us_are_two_things():
    lost = MissingMachine("lab-1", "lab", "nothing was heard of it", started=True)
    found = verdicts(report(missing=(MissingMachine("spot-1", "spot", "no such partition", "set partition"), lost)))
    assert [one.verdict for one in found] == ["bad", "bad"]
    assert (found[0].found, found[0].do) == ("it did not come: no such partition", "set partition")
    assert "https://10.0.0.9:29300" in found[1].found
    assert "address" in found[1].do


def test_clocks_disks_and_versions_that_differ_are_named():
    odd = machine("lab-2", disk=1 * GB, python="3.12.1", torch="2.8.0", skew_s=-7.0)
    found = {one.what: one for one in verdicts(report(A, odd))}
    assert found["Python"].found == "3.11 on lab-1; 3.12 on lab-2"
    assert found["torch"].found == "2.9.0 on lab-1; 2.8.0 on lab-2"
    texts = [one.found for one in verdicts(report(A, odd))]
    assert any("7.0 s behind" in text for text in texts)
    assert any("MiB of disk" in text for text in texts)
    assert not verdicts(report(A, machine("lab-2", skew_s=1.005)))


def test_a_machine_without_a_framework_is_a_warning():
    (found,) = verdicts(report(machine("lab-1", torch="")))
    assert "torch" in found.found


def test_the_report_reads_as_a_table_with_remedies():
    whole = report(A, B, pairs=(bad("lab-1", "lab-2", "refused"), good("lab-2", "lab-1")))
    shown = checkup.text(PoolReport(whole.machines, whole.pairs, (), whole.urls, "", verdicts(whole)))
    assert "NOT REACHED" in shown
    assert "1000 MB/s" in shown
    assert "do: a firewall rejects it" in shown
