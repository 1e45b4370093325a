"""Which processes should exist: the pure state machine of agents and processes."""
