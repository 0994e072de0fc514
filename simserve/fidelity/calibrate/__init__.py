"""Measures the real executor's steps on a GPU and fits a profile: `simserve calibrate`."""
