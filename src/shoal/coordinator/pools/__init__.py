"""Pools: the provisioner, and one worker for each pool."""
