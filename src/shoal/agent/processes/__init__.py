"""Processes of members: the warm process that forks them, what a fork becomes, and how process trees are ended.

`warm_process` is the agent's side, `zygote` the other; they talk in `zygote_messages`. `child_main` runs in the fork.
May import: shoal.errors.
"""
