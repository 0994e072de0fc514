"""Signals that come together: the first is an interrupt, and of the others nothing is said."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from simserve.cli.interrupt import interrupted_once

TOGETHER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def restored() -> Iterator[None]:
    actions = {number: signal.getsignal(number) for number in TOGETHER}
    for number in TOGETHER:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, action in actions.items():
        signal.signal(number, action)


@pytest.mark.usefixtures("restored")
def test_signals_at_the_same_moment_are_one_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    cleaned_up: list[bool] = []

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, TOGETHER)
        for number in TOGETHER:
            signal.raise_signal(number)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, TOGETHER)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned_up.append(True)

    with pytest.raises(KeyboardInterrupt), interrupted_once():
        work()
    signal.raise_signal(signal.SIGINT)
    assert cleaned_up
    assert not said
