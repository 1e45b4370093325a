"""Keras' backends: how gradients are computed and applied, and how variables are read, on TensorFlow and on PyTorch.

May import: worker, core, errors, and the other modules of this folder.
"""
