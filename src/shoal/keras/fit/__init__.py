"""What `model.fit` calls, is given and changes."""
