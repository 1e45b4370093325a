"""Training loops of Keras models, one module per sync mode, with their optimizers and the state they transfer.

May import: keras/fit, keras/backends, worker, core, errors.
"""
