"""Fleet: which member processes should exist, and on which agents. `decide` has the theory.

May import: shoal.core (top level), shoal.core.membership, shoal.core.provisioning, shoal.errors, shoal.exit_codes.
"""
