"""Sweeps and searches: many runs of one configuration, each in a process of its own."""
