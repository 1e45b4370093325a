from __future__ import annotations

import pytest

from shoal.core.membership.fingerprint import FingerprintDifference, describe, differences


def test_first_differing_item_of_a_list_is_named() -> None:
    (only,) = differences("parameters=a 2, b 3, c 4;size=8", "parameters=a 2, b 5, c 6;size=8")
    assert only == FingerprintDifference("parameters", "b 3", "b 5")
    assert describe([only], "lab/1") == "parameters: b 3 in the run, b 5 on lab/1"


def test_section_or_item_that_one_side_lacks_is_nothing_there() -> None:
    found = differences("parameters=a, b;size=8", "parameters=a")
    assert describe(found, "m") == "parameters: b in the run, nothing on m; size: 8 in the run, nothing on m"
    assert differences("", "size=8") == (FingerprintDifference("size", "", "8"),)


def test_at_most_three_sections_are_named() -> None:
    found = differences("a=1;b=1;c=1;d=1", "a=2;b=2;c=2;d=2")
    assert [each.section for each in found] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("section", "concerns_data"), [("data", True), ("validation", True), ("parameters", False), ("data_size", False)]
)
def test_only_sections_about_samples_concern_data(section: str, concerns_data: bool) -> None:
    (only,) = differences(f"{section}=1", f"{section}=2")
    assert only.concerns_data is concerns_data


def test_hashes_that_differ_have_no_sections() -> None:
    assert differences("abc", "def") == ()
    assert describe((), "m") == "the fingerprints differ"


def test_value_may_contain_an_equals_sign() -> None:
    (only,) = differences("a=x=1", "a=x=2")
    assert (only.in_run, only.on_member) == ("x=1", "x=2")
