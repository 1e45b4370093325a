"""The journal, its SQLite views, and the places that checkpoints are written to."""
