"""Errors by their code, and errors that cross a process boundary."""

from __future__ import annotations

import pickle

from shoal import errors


def test_catalog_is_sorted_by_code_and_maps_each_code_to_its_class() -> None:
    catalog = errors.catalog()
    assert list(catalog) == sorted(catalog)
    assert catalog["S000"] is errors.ShoalError
    assert catalog["S503"] is errors.CheckpointFailed


def test_error_is_rebuilt_from_its_code_and_texts() -> None:
    error = errors.from_code("S204", "no route", where="world 2", why="a firewall", do="open the port")
    assert type(error) is errors.PeerUnreachable
    assert (error.what, error.where, error.why, error.do) == ("no route", "world 2", "a firewall", "open the port")


def test_unknown_code_becomes_a_plain_error_with_the_same_text() -> None:
    error = errors.from_code("S999", "from a newer version")
    assert type(error) is errors.ShoalError
    assert error.what == "from a newer version"


def test_pickled_error_keeps_all_its_texts() -> None:
    error = errors.FrameworkMissing("no torch", where="here", why="not installed", do="install it")
    restored = pickle.loads(pickle.dumps(error))
    assert type(restored) is errors.FrameworkMissing
    assert str(restored) == str(error)
