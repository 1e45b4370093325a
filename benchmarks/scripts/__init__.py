"""The same training loop for each side; the scripts differ only in how it is distributed."""
