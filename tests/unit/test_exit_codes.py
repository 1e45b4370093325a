"""The exit codes that scripts and job schedulers rely on."""

from __future__ import annotations

import os

from shoal import exit_codes
from shoal.errors import LaunchError, TrainingError, UsageError

CODES = {name: value for name, value in vars(exit_codes).items() if name.isupper()}


def test_codes_differ_from_each_other() -> None:
    assert len(set(CODES.values())) == len(CODES)


def test_resumable_is_the_temporary_failure_of_sysexits() -> None:
    assert exit_codes.RESUMABLE == os.EX_TEMPFAIL


def test_error_families_exit_with_listed_codes() -> None:
    families = (TrainingError, UsageError, LaunchError)
    assert [family.exit_code for family in families] == [
        exit_codes.FAILED,
        exit_codes.BAD_USAGE,
        exit_codes.UNAVAILABLE,
    ]
