"""Which samples make up a batch or a round."""
