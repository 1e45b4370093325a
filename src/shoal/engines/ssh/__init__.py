"""Engine for ssh: agents are processes on hosts that the user's own ssh reaches.

`engine` chooses hosts, `host_connection` calls one host, and `remote_helper` is the program that it runs there.
May import: shoal.engines, shoal.errors.
"""
