"""The engine that starts agents through Slurm."""
