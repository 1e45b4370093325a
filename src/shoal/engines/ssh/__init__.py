"""The engine that starts agents through ssh."""
