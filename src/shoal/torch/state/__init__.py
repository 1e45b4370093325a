"""PyTorch state: capture, encoding, layout and fingerprint."""
