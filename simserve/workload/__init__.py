"""Workloads: requests over time, read from traces or generated from a seed."""
