"""Notices that a machine will go away."""
