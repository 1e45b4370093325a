"""Keras training loops, one module for each way to keep members together."""
