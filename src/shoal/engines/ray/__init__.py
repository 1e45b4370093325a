"""Engine for Ray: agents are children of detached actors.

`driver` is the only program that imports Ray; it runs in a process of its own. May import: shoal.engines, shoal.errors.
"""
