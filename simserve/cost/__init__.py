"""Cost models: how long a step takes, from the work in its plan."""
