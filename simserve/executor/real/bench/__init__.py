"""Measures kernels and whole steps: the code behind `simserve bench`."""
