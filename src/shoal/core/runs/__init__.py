"""A coordinator as a function of its journal: runs, their events, queue and story."""
