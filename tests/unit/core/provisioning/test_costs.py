"""Accounts: charges are divided by slots and add up."""

from __future__ import annotations

import pytest

from shoal.core.provisioning.costs import Account, MachineCharge, charge, count_loss

HOUR = MachineCharge("spot", price_per_h=2.0, on_demand_per_h=5.0, seconds=3600.0)


def test_charge_is_divided_by_the_slots_of_each_run() -> None:
    account = charge(Account(), HOUR, {"a": 3, "b": 1})
    assert account.of_run("a").spent == pytest.approx(1.5)
    assert account.of_run("b").saved == pytest.approx(0.75)
    assert account.of_pool("spot").machine_s == account.total.machine_s == pytest.approx(3600.0)


def test_machine_without_a_run_is_charged_to_the_empty_name() -> None:
    account = charge(Account(), MachineCharge("spot", 2.0, 0.0, 1800.0, in_use=False), {})
    assert (account.of_run("").spent, account.of_run("").unused, account.of_run("").saved) == (1.0, 1.0, 0.0)


def test_loss_counts_for_every_run_that_used_the_machine() -> None:
    account = count_loss(charge(Account(), HOUR, {"a": 1}), "spot", ("a", "b"))
    assert (account.of_run("a").lost, account.of_run("b").lost) == (1, 1)
    assert account.of_run("a").spent == pytest.approx(2.0)
