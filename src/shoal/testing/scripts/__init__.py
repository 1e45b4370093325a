"""Scripts of the conformance suite: one task, written once for every framework.

May import: core, the public fronts shoal.torch and shoal.keras, and the other modules of this folder.
"""
