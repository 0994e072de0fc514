"""Times calls on the GPU as replays of one CUDA graph, so that the host is out of the figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Call", "Timer", "time_graph"]

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], list[float]]
"""Samples of µs a call, from calls that take turns on different buffers."""

_MIN_SAMPLES = 5
_MAX_SAMPLES = 50
_BUDGET_US = 1e5


def time_graph(calls: Sequence[Call]) -> list[float]:
    """Return samples of µs a call: one replay of a graph of all calls each, over their number.

    Nothing is compiled while the graph is captured, because the first calls have run before.
    There are 5 to 50 samples, as many as make up a tenth of a second.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = _replay_us(graph)
    num_samples = max(_MIN_SAMPLES, min(_MAX_SAMPLES, int(_BUDGET_US / once)))
    return [_replay_us(graph) / len(calls) for _ in range(num_samples)]


def _replay_us(graph: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) * 1e3)
