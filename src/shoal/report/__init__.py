"""Reports of runs for other programs: event files that TensorBoard reads (`tensorboard`).

May import: shoal.core, shoal.wire, shoal.errors.
"""
