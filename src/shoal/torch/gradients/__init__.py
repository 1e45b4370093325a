"""PyTorch gradients: guards, buckets, norms, process groups and synchronised BatchNorm."""
