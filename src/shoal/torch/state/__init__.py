"""Training state of a PyTorch script: captured, compared and restored without pickle.

May import: errors, and the other modules of this folder.
"""
