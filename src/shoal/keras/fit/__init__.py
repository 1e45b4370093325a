"""Interface to `model.fit`: its train function, its arguments, and the kinds of variables that it changes.

May import: keras/backends, worker, core, errors.
"""
