"""Trace readers, one module a file format."""
