"""The same training loop four times; the scripts differ only in who distributes it."""
