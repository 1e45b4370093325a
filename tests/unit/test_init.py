"""Names of the package itself."""

from __future__ import annotations

import pytest

import shoal


def test_join_without_a_framework_names_the_module_to_import() -> None:
    with pytest.raises(AttributeError, match="use: import shoal"):
        shoal.join  # noqa: B018
