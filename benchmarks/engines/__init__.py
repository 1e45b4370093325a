"""Shoal on clusters against what these clusters are usually trained on with: srun and ssh with torchrun, Ray Train."""
