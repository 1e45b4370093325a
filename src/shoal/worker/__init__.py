"""Inside a training process, whatever the framework: join, exchange, commit, hand state over."""
