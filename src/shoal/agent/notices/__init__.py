"""Notices: warnings that this machine will be taken away, from clouds, from Slurm, or from a file.

`source` opens a source by name. May import: shoal.errors, shoal.engines.slurm (its parser of times).
"""
