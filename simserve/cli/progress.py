"""Progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

from simserve.errors import counted

if TYPE_CHECKING:
    import rich.progress

    from simserve.report.timeline import Track

__all__ = ["Progress", "tracking", "waiting"]

T = TypeVar("T")

_REDRAW_S = 0.1
_FIRST_LINE = 1000
_TASKS = {"simulated": "simulating", "measured": "running"}


class Progress:
    """Shows the time on the engine's clock and requests done; cheap enough for every step.

    A real run's clock shows what was measured, not simulated.
    """

    def __init__(self, enabled: bool = True, is_real: bool = False) -> None:
        self._enabled = enabled
        self._clock = "measured" if is_real else "simulated"
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._next_draw_s = 0.0
        self._next_line = 0

    def __enter__(self) -> Self:
        if self._enabled and sys.stderr.isatty():
            self._bar = _make_bar()
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, now_s: float, num_done: int, num_total: int | None) -> None:
        """Take note of the time, and of requests done out of all (None: not known)."""
        if not self._enabled:
            return
        if self._bar is None:
            try:
                self._print_line(now_s, num_done, num_total)
            except OSError:
                self._enabled = False  # nobody reads it: that must not end the simulation
            return
        clock_s = time.perf_counter()
        if clock_s < self._next_draw_s and num_done != num_total:
            return
        self._next_draw_s = clock_s + _REDRAW_S
        if self._task is None:
            self._task = self._bar.add_task(_TASKS[self._clock], clock="")
        self._bar.update(
            self._task, completed=num_done, total=num_total, clock=f"{now_s:.1f} s {self._clock}"
        )

    def _print_line(self, now_s: float, num_done: int, num_total: int | None) -> None:
        """A line each tenth of the requests; of an unknown number, each time they have doubled."""
        if num_done < max(self._next_line, 1):
            return
        if num_total is None:
            self._next_line = max(_FIRST_LINE, 2 * num_done)
        else:
            tenth = 10 * num_done // num_total + 1
            self._next_line = -(-num_total * tenth // 10)
        of_all = "" if num_total is None else f"{num_done} of "
        done = of_all + counted(num_done if num_total is None else num_total, "request")
        print(f"{now_s:.1f} s {self._clock}, {done}", file=sys.stderr)


@contextmanager
def tracking() -> Iterator[Track]:
    """Shows how far loops over items are: a bar each on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda items, what: items
        return
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, transient=True) as bars:

        def track(items: Sequence[T], what: str) -> Iterable[T]:
            return bars.track(items, description=what)

        yield track


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows what goes on that nobody can say the length of: a clock on a terminal, else a line."""
    if not sys.stderr.isatty():
        print(f"{what} …", file=sys.stderr)
        yield
        return
    import rich.console
    import rich.progress as parts

    columns = (parts.SpinnerColumn(), parts.TextColumn("{task.description}"))
    console = rich.console.Console(stderr=True)
    with parts.Progress(
        *columns, parts.TimeElapsedColumn(), console=console, transient=True, refresh_per_second=4
    ) as bars:
        bars.add_task(what, total=None)
        yield


def _make_bar() -> rich.progress.Progress:
    import rich.console
    import rich.progress as parts

    return parts.Progress(
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        parts.MofNCompleteColumn(),
        parts.TextColumn("requests, {task.fields[clock]}"),
        parts.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True),
        transient=True,
    )
