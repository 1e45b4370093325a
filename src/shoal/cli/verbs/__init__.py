"""The verbs of the command line, one module each; each has a click command called `command`.

May import: everything but `experiment` and `testing`.
"""
