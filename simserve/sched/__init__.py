"""Schedulers: who runs in the next step, and with how many tokens."""
