"""`until`: the first true value, or an error that says what was waited for."""

from __future__ import annotations

import pytest

from shoal.testing.wait import until


def test_first_true_value_is_returned() -> None:
    values = iter([0, "", "ready", "later"])
    assert until(lambda: next(values), "a value", poll_s=0) == "ready"


def test_condition_that_is_true_is_not_waited_for() -> None:
    assert until(lambda: 7, "a value", timeout_s=-1) == 7


def test_error_names_what_was_waited_for_and_the_details() -> None:
    with pytest.raises(AssertionError, match="timed out after 0 s: the server\nits log"):
        until(lambda: False, "the server", timeout_s=0, details=lambda: "its log", poll_s=0)
