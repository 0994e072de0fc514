"""Reads what was measured: step logs and timed passes of engines, runs of the real executor."""
