"""Who is in a run: the pure state machine of its members."""
