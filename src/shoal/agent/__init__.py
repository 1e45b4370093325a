"""The one process on a machine that starts, watches and surely ends the members there."""
