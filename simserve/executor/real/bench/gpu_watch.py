"""The clock and the power of the GPU while something is measured, by the driver's own tool."""

from __future__ import annotations

import statistics
import subprocess
import threading
from time import perf_counter
from typing import NamedTuple

__all__ = ["GpuState", "GpuWatch"]

_QUERY = "clocks.sm,power.draw,enforced.power.limit"
_PERIOD_MS = 20


class GpuState(NamedTuple):
    """Medians over a time."""

    sm_clock_mhz: float
    power_w: float
    power_limit_w: float


class GpuWatch:
    """Lets `nvidia-smi` print the state of a GPU again and again, in a process of its own.

    A long matrix product may be bound by neither memory nor multipliers but by the power that the
    board may draw: then the clock falls, and says so here. Where there is no such tool, nothing is
    seen and nothing fails.

    Args:
        index: number of the GPU as the tool counts.
    """

    def __init__(self, index: int = 0) -> None:
        self._command = [
            "nvidia-smi", f"--id={index}", f"--query-gpu={_QUERY}",
            "--format=csv,noheader,nounits", f"--loop-ms={_PERIOD_MS}",
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self._seen: list[tuple[float, GpuState]] = []

    def __enter__(self) -> GpuWatch:
        try:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return self
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                try:
                    state = GpuState(*map(float, line.split(",")))
                except (ValueError, TypeError):  # "[N/A]": this GPU does not tell
                    continue
                self._seen.append((perf_counter(), state))

    def between(self, begin_s: float, end_s: float) -> GpuState | None:
        """Medians of what was seen between two times of `perf_counter`; None: nothing was."""
        found = [state for at, state in list(self._seen) if begin_s <= at <= end_s]
        return GpuState(*map(statistics.median, zip(*found, strict=True))) if found else None
