"""Tests of Shoal; helper modules are imported by their full name, as `tests.process.faults.checked_run`."""
