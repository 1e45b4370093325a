"""`shoal.run`: a run from Python or a notebook, of a function that says what to train and how to evaluate it."""
