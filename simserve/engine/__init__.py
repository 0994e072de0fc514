"""The event loop: arrivals and steps as SimPy processes on one clock (alone in importing simpy)."""
