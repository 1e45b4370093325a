"""Data for `model.fit`: arrays, PyDatasets and tf.data pipelines, cut into this member's share of every global batch.

May import: keras/modes, keras/fit, keras/backends, worker, core, errors.
"""
