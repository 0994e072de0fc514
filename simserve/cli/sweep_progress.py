"""Progress of a sweep on standard error: a live table on a terminal, a line a point elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

__all__ = ["SHOWN", "SweepProgress", "heading", "shown_cells"]

SHOWN = {
    "p50_ttft_ms": "TTFT p50 (ms)",
    "p99_ttft_ms": "TTFT p99 (ms)",
    "p99_itl_ms": "ITL p99 (ms)",
    "output_throughput": "tokens/s",
}
"""Numbers of a summary that tables of points show, and their headings."""
_NUM_RECENT = 12
_HEADING_WIDTH = 9


class SweepProgress:
    """Shows which points run, and what came of the last ones (a `Listener` of sweeps)."""

    def __init__(self, num_points: int, enabled: bool = True) -> None:
        self.num_done = 0
        self.num_failed = 0
        self._num_points = num_points
        self._enabled = enabled
        self._started_s = time.perf_counter()
        self._running: dict[str, float] = {}
        self._recent: deque[tuple[str, str, list[str]]] = deque(maxlen=_NUM_RECENT)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True)
            self._live = Live(get_renderable=self._render, console=console, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, name: str) -> None:
        """A point runs."""
        self._running[name] = time.perf_counter()

    def ended(self, name: str, summary: Mapping[str, Any] | None, message: str) -> None:
        """A point is done, or has failed."""
        started_s = self._running.pop(name, None)
        took = "before" if started_s is None else f"{time.perf_counter() - started_s:.1f} s"
        self.num_done += summary is not None
        self.num_failed += summary is None
        first_line = message.partition("\n")[0]
        if summary is None:
            took = "failed"
        self._recent.append((name, took, shown_cells(summary) if summary else [first_line]))
        if self._enabled and self._live is None:
            what = f"failed: {first_line}" if summary is None else took
            count = self.num_done + self.num_failed
            print(f"[{count}/{self._num_points}] {name}: {what}", file=sys.stderr)

    def _render(self) -> RenderableType:
        from rich.table import Table

        now_s = time.perf_counter()
        table = Table(title=self._headline(now_s), title_justify="left")
        for heading in ("point", "took", *SHOWN.values()):
            table.add_column(heading, justify="left" if heading == "point" else "right")
        for name, took, cells in list(self._recent):
            table.add_row(name, took, *cells)
        for name, started_s in list(self._running.items()):
            table.add_row(name, f"{now_s - started_s:.0f} s …", style="dim")
        return table

    def _headline(self, now_s: float) -> str:
        count = self.num_done + self.num_failed
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return (
            f"{count} of {self._num_points} points{failed}, {len(self._running)} running, "
            f"{now_s - self._started_s:.0f} s"
        )


def heading(key: str, width: int = _HEADING_WIDTH) -> str:
    """A key over a column, in lines that end where it may be divided.

    >>> heading("max_num_batched_tokens").split()
    ['max_num_', 'batched_', 'tokens']
    """
    lines = [""]
    for part in re.findall(r"[^_.]*[_.]?", key):
        if len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def shown_cells(summary: Mapping[str, Any]) -> list[str]:
    """The numbers of `SHOWN` as text; a dash for what was not measured."""
    return [_number(summary.get(key)) for key in SHOWN]


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return "–" if value is None else f"{value:,}"
