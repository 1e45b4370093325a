"""What a run takes along besides Shoal: the user's function and files, by the hash of what they hold."""
