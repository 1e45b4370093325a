"""Which machines to request from pools: the pure state machine of allocations."""
