"""Environments that travel: recipes, requirements and Shoal's own wheel."""
