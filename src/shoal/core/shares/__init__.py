"""Shares: how many samples of each global batch every member computes.

`balancer` explains the whole. `split` divides a batch, `member_speed`, `cost_curve` and `speed_table` hold the measured
costs, `share_policy` and `measurement_window` decide when shares change. `reduction_tree` serves exact mode.

May import: errors.
"""
