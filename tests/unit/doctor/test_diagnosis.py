"""Verdicts and remedies for what the machines of pools report."""

from __future__ import annotations

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


def good(source: str, target: str, bytes_per_s: float = 1e9) -> ConnectionReport:
    return ConnectionReport(
        source, target, (ConnectAttempt(f"10.0.0.{target[-1]}", 20000, round_trip_s=1e-4, bytes_per_s=bytes_per_s),)
    )


def bad(source: str, target: str, *causes: str) -> ConnectionReport:
    return ConnectionReport(
        source, target, tuple(ConnectAttempt(f"10.0.{i}.3", 20000, cause, "no") for i, cause in enumerate(causes))
    )


def report(
    *machines: MachineReport,
    pairs: tuple[ConnectionReport, ...] = (),
    missing: tuple[MissingMachine, ...] = (),
    ports: str = "",
) -> PoolReport:
    return PoolReport(machines, pairs, missing, ("https://10.0.0.9:29300",), ports)


A, B = machine("lab-1"), machine("lab-2")


def test_machines_that_reach_each_other_have_good_verdicts():
    checks = verdicts(report(A, B, pairs=(good("lab-1", "lab-2"), good("lab-2", "lab-1"))))
    assert {check.verdict for check in checks} == {"good"}


def test_dropped_port_is_reported_with_both_machines_and_the_ports_to_open():
    checks = verdicts(
        report(A, B, pairs=(good("lab-2", "lab-1"), bad("lab-1", "lab-2", "silent")), ports="20000-20100")
    )
    assert checks[0].verdict == "bad"
    assert checks[0].what == "lab-1 → lab-2"
    assert "10.0.0.3:20000" in checks[0].finding
    assert "open TCP 20000-20100 between the machines" in checks[0].do


def test_address_of_both_machines_is_not_reported_as_a_firewall():
    (check,) = [check for check in verdicts(report(A, B, pairs=(bad("lab-1", "lab-2", "wrong peer"),))) if check.do]
    assert "interface" in check.do
    (check,) = [
        check for check in verdicts(report(A, B, pairs=(bad("lab-1", "lab-2", "no route", "no route"),))) if check.do
    ]
    assert "networks" in check.do


def test_one_reachable_address_is_enough():
    attempts = (ConnectAttempt("172.17.0.1", 20000, "wrong peer", "no"), *good("lab-1", "lab-2").attempts)
    assert verdicts(report(A, B, pairs=(ConnectionReport("lab-1", "lab-2", attempts),)))[0].verdict == "good"


def test_closed_port_of_the_range_is_reported_although_another_is_open():
    pair = ConnectionReport(
        "lab-1", "lab-2", (*good("lab-1", "lab-2").attempts, ConnectAttempt("10.0.0.2", 20100, "silent", "no"))
    )
    checks = verdicts(report(A, B, pairs=(pair,), ports="20000-20100"))
    assert "10.0.0.2:20100" in checks[0].finding
    assert checks[0].verdict == "bad"


def test_slow_connection_is_a_warning():
    checks = verdicts(report(A, B, pairs=(good("lab-1", "lab-2", bytes_per_s=1e6),)))
    assert checks[0].verdict == "warning"


def test_machine_that_did_not_start_differs_from_one_that_did_not_connect():
    lost = MissingMachine("lab-1", "lab", "no sign of it", started=True)
    checks = verdicts(report(missing=(MissingMachine("spot-1", "spot", "no such partition", "set partition"), lost)))
    assert [check.verdict for check in checks] == ["bad", "bad"]
    assert (checks[0].finding, checks[0].do) == ("not started: no such partition", "set partition")
    assert "https://10.0.0.9:29300" in checks[1].finding
    assert "address" in checks[1].do


def test_differing_clocks_disks_and_versions_are_reported():
    odd = machine("lab-2", disk=1 * GB, python="3.12.1", torch="2.8.0", skew_s=-7.0)
    by_subject = {check.what: check for check in verdicts(report(A, odd))}
    assert by_subject["Python"].finding == "3.11 on lab-1; 3.12 on lab-2"
    assert by_subject["torch"].finding == "2.9.0 on lab-1; 2.8.0 on lab-2"
    texts = [check.finding for check in verdicts(report(A, odd))]
    assert any("7.0 s behind" in text for text in texts)
    assert any("MiB of disk" in text for text in texts)
    assert not verdicts(report(A, machine("lab-2", skew_s=1.005)))


def test_machine_without_a_framework_is_a_warning():
    (check,) = verdicts(report(machine("lab-1", torch="")))
    assert "torch" in check.finding
