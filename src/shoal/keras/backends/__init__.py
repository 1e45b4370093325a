"""Keras on TensorFlow and on PyTorch."""
