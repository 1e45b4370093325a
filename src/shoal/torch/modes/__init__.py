"""PyTorch training loops, one per sync mode: `every_step`, `local_sgd`, and `served` with parameter servers.

May import: core, errors, worker, torch.data, torch.gradients, torch.state.
"""
