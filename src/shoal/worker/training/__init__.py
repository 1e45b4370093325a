"""One step on one member, whatever the framework."""
