"""The evaluator."""
