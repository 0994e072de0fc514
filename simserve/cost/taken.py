"""How many steps of a run that was priced were taken: a message may end it early."""

from __future__ import annotations

__all__ = ["num_taken"]


def num_taken(first: int, count: int, next_step: int | None) -> int:
    """Of `count` steps from number `first` on, those before the step that was priced next.

    `next_step` is its number; None: there is none yet, and all count. So they do if it is not a
    later one, as for plans without numbers.

    >>> num_taken(7, 5, 9), num_taken(7, 5, 12), num_taken(7, 5, None), num_taken(0, 5, 0)
    (2, 5, 5, 5)
    """
    if next_step is None or next_step <= first:
        return count
    return min(count, next_step - first)
