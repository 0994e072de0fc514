"""Executors: run a step plan, on a cost model or on a GPU, and say when it ends."""
