"""Runs what a log recorded through the simulator, and compares the plans step by step."""
