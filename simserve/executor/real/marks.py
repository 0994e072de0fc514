"""Points in time on the device: CUDA events, or the host's clock where there is no GPU."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

import torch

__all__ = ["LayerMarks", "Marks"]


class Marks:
    """A growing list of points in time, read when the device has passed them.

    On a GPU, marks may be captured in a CUDA graph (`in_graph`): each replay takes them anew.
    """

    def __init__(self, device: torch.device, in_graph: bool = False) -> None:
        self._is_cuda = device.type == "cuda"
        self._in_graph = in_graph
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._count = 0

    def restart(self) -> None:
        """Take the next mark as the first."""
        self._count = 0
        self._times.clear()

    def take(self) -> None:
        """Mark this point of the current stream."""
        if not self._is_cuda:
            self._times.append(perf_counter())
            return
        if self._count == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True, external=self._in_graph))
        self._events[self._count].record()
        self._count += 1

    def seconds(self) -> list[float]:
        """Time from each mark to the next; on a GPU all of them must have been passed."""
        if not self._is_cuda:
            return [b - a for a, b in pairwise(self._times)]
        events = self._events[: self._count]
        return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]


class LayerMarks(Marks):
    """Three marks a layer, around the KV write and around attention, and two around the head."""

    def parts(self, forward_s: float) -> dict[str, float]:
        """Seconds of the forward pass by part; `linear_s` is all that is none of the others."""
        gaps = self.seconds()
        if not gaps:
            return {}
        layers = len(gaps) // 3
        parts = {
            "kv_write_s": sum(gaps[0 : 3 * layers : 3]),
            "attention_s": sum(gaps[1 : 3 * layers : 3]),
            "head_s": gaps[-1],
        }
        return {"linear_s": forward_s - sum(parts.values())} | parts
