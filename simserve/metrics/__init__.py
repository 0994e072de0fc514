"""Measurements: listens to the engine, reduces what it heard, and keeps run directories."""
