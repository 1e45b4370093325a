"""Shoal trains one model on many cheap, unequal, short-lived machines as if they were one dependable machine."""

__version__ = "0.1.0"
