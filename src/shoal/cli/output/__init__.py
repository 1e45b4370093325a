"""Presentation of runs on a terminal: plain lines, JSON lines, a live panel, and the summary at the end.

May import: `core`, `wire`, `errors`.
"""
