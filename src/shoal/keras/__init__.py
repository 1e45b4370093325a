"""Shoal for Keras 3: ``import shoal.keras as shoal``.

Example::

    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(shoal.batches(x, y, size=512), epochs=10, callbacks=[shoal.Elastic()])

The modules beside this one are the public API; the folders, from the top layer to the bottom, are data, modes, fit and
backends.

May import: keras/data, keras/modes, keras/fit, keras/backends, worker, core, errors.
"""

from __future__ import annotations

from shoal.worker.framework import missing_framework_error

try:
    from shoal.keras.data.batches import Batches, batches
    from shoal.keras.elastic import Elastic
    from shoal.keras.run import Run, elastic, join
except ModuleNotFoundError as error:
    raise missing_framework_error(error) from None

__all__ = ["Batches", "Elastic", "Run", "batches", "elastic", "join"]
