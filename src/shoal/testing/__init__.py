"""Doubles and stages for tests of Shoal and of scripts that use it."""
