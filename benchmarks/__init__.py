"""Benchmarks of Shoal and its peers: what faults and steps cost (`python -m benchmarks`)."""
