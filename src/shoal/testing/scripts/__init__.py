"""The scripts of the conformance suite: one task, written once for every framework."""
