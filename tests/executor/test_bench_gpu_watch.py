"""What is seen of the GPU while something is measured, with a made-up tool."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter, sleep

import pytest

from simserve.executor.real.bench.gpu_watch import GpuState, GpuWatch


def put_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """An `nvidia-smi` that prints some lines and then waits to be ended."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def watched(watch: GpuWatch, begin_s: float) -> GpuState | None:
    """What was seen since then, as soon as there is something; None after some time."""
    while perf_counter() < begin_s + 5:
        state = watch.between(begin_s, perf_counter())
        if state is not None and state.sm_clock_mhz == 1500:
            return state
        sleep(0.01)
    return None


def test_medians_of_what_the_tool_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tool(tmp_path, monkeypatch, r"1400, 600.5, 700.0\n1600, 690, 700\n1500, 650, 700\n")
    begin_s = perf_counter()
    with GpuWatch() as watch:
        assert watched(watch, begin_s) == (1500, 650, 700)
        assert watch.between(begin_s - 2, begin_s - 1) is None
    assert perf_counter() < begin_s + 10, "the tool is ended, not waited for"


@pytest.mark.parametrize("lines", [r"[N/A], 5, 700\n", r"no devices were found\n", r"1, 2\n"])
def test_what_is_no_number_is_not_seen(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_tool(tmp_path, monkeypatch, lines + r"1500, 1, 2\n")
    begin_s = perf_counter()
    with GpuWatch() as watch:
        assert watched(watch, begin_s) == (1500, 1, 2)


def test_without_the_tool_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with GpuWatch() as watch:
        assert watch.between(0.0, perf_counter()) is None
