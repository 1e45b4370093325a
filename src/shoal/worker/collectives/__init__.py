"""All-reduce and all-gather between members."""
