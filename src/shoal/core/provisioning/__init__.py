"""Which machines to request from which pools, and which to release.

`decide` is the state machine and explains the whole; `assignment` says which run uses which machine, `budget` what a
run can still pay for, `feasibility` whether a run can start at all.

May import: core modules, errors.
"""
