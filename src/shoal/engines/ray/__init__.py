"""The engine that starts agents through Ray."""
