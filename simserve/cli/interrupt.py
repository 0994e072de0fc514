"""Ctrl-C twice: the first one ends a command, and those behind it let it clean up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupted_once"]


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Within, one Ctrl-C, SIGTERM or SIGHUP is an interrupt. After it no other one is heard."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    actions = {number: signal.getsignal(number) for number in numbers}
    heard = {number: action for number, action in actions.items() if callable(action)}
    is_over = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal is_over
        is_over = True
        for other in heard:
            signal.signal(other, _unheard)
        raise KeyboardInterrupt

    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, action in heard.items():
            signal.signal(number, signal.SIG_IGN if is_over else action)


def _unheard(number: int, frame: FrameType | None) -> None:
    """Of a signal that came with the first one, Python would say that it was not handled in time if
    it were ignored by then."""
