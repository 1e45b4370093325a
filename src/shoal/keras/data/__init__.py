"""Data for `model.fit`: batches, arrays and tf.data pipelines."""
