"""The HTTP API: routes, commands, authentication and metrics."""
