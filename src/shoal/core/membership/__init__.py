"""Membership of a run: which members are in the live world, and how the world changes. `decide` has the theory.

May import: shoal.core (top level), shoal.exit_codes.
"""
