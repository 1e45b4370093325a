"""Shoal on clusters against the usual launchers there: srun and ssh with torchrun, and Ray Train."""
