"""What faults and steps cost with Shoal and with its peers: `python -m benchmarks`."""
