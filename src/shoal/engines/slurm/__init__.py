"""Engine for Slurm: agents are batch jobs.

`jobs`, `nodes` and `errors` read what Slurm's commands print. May import: shoal.engines, shoal.errors, shoal.wire.
"""
