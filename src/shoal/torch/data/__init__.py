"""How PyTorch data is read."""
