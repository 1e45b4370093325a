"""How large the global batch is: goodput, gradient noise, the `batch` setting."""
