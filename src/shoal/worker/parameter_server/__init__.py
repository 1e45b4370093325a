"""Parameter servers and the sessions that are served by them."""
