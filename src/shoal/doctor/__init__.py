"""`shoal doctor`: checks of this machine and of the machines of pools."""
