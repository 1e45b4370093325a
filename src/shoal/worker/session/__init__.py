"""A member's session with the coordinator."""
