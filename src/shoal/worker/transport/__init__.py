"""Bytes between members: listening, connecting, handshakes and state transfer."""
