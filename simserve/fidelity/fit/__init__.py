"""From measured steps to a profile: `simserve fit`."""
