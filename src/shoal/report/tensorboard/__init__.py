"""Event files for TensorBoard: rows, format and writer."""
