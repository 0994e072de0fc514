"""Lengths for ServeGen windows, drawn from the histograms of a dataset.json."""

from __future__ import annotations

import ast
import json
from bisect import bisect_right
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from simserve.errors import TraceError
from simserve.types import MmItem
from simserve.workload.rows import MAX_TOKENS

__all__ = ["ServeGenLengths", "dataset_path", "is_number"]

_MEDIA = ("image", "audio", "video")
_MAX_ITEMS = 1000


def is_number(text: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return isfinite(float(text))
    except ValueError:
        return False


class _Histogram:
    """Lengths and how often each occurs."""

    def __init__(self, lengths: list[int], weights: list[float]) -> None:
        self._lengths = lengths
        total = np.cumsum(weights)
        self._cumulative = total / total[-1]

    def draw(self, rng: np.random.Generator) -> int:
        index = int(np.searchsorted(self._cumulative, rng.random(), side="right"))
        return self._lengths[index]


class ServeGenLengths:
    """The histograms of a dataset.json, by kind and by the time from which they hold.

    Raises:
        TraceError: the file cannot be read, or has no lengths of prompts or outputs.
    """

    def __init__(self, path: Path) -> None:
        self._by_kind: dict[str, tuple[list[float], list[_Histogram]]] = {}
        for start_s, kinds in sorted(_load_dataset(path).items()):
            for kind, text in kinds.items():
                histogram = _parse_histogram(path, start_s, kind, text)
                if histogram is not None:
                    starts, histograms = self._by_kind.setdefault(kind, ([], []))
                    starts.append(start_s)
                    histograms.append(histogram)
        self._text_kind = "text_tokens" if "text_tokens" in self._by_kind else "input_tokens"
        for kind in (self._text_kind, "output_tokens"):
            if kind not in self._by_kind:
                raise TraceError(f"{path}: {kind}: no window has a histogram of it")

    def draw(self, request_id: str, time_s: float, rng: np.random.Generator) -> dict[str, Any]:
        """The fields of a request: text first, then its media items, each of its own identity.

        A length of 0 becomes 1: no request has an empty prompt or no output.
        """
        prompt_len = max(self._one(self._text_kind, time_s, rng), 1)
        output_len = max(self._one("output_tokens", time_s, rng), 1)
        items: list[MmItem] = []
        for medium in _MEDIA:
            if f"{medium}_tokens" not in self._by_kind:
                continue
            counted = f"{medium}_count" in self._by_kind
            for _ in range(self._one(f"{medium}_count", time_s, rng) if counted else 1):
                length = self._one(f"{medium}_tokens", time_s, rng)
                if length:
                    identifier = f"{request_id}/{medium}/{len(items)}"
                    items.append(MmItem(identifier, prompt_len, length))
                    prompt_len += length
        return {
            "request_id": request_id,
            "prompt": ((f"{request_id}/prompt", prompt_len),),
            "output_len": output_len,
            "mm_items": tuple(items),
        }

    def _one(self, kind: str, time_s: float, rng: np.random.Generator) -> int:
        starts, histograms = self._by_kind[kind]
        return histograms[max(bisect_right(starts, time_s) - 1, 0)].draw(rng)


def dataset_path(path: Path, given: str | None) -> Path:
    """The dataset.json given, or the one that lies beside a ...trace.csv.

    A relative path starts at the current folder or, if there is no such file, at the trace's.

    Raises:
        TraceError: none was given, and none lies there.
    """
    if given is not None:
        from_trace = path.parent / given
        return from_trace if from_trace.exists() and not Path(given).exists() else Path(given)
    beside = path.with_name(path.name.removesuffix("trace.csv") + "dataset.json")
    if path.name.endswith("trace.csv") and beside.is_file():
        return beside
    raise TraceError(
        f"{path}: its lengths are in a dataset.json; give its path as the option dataset"
    )


def _load_dataset(path: Path) -> dict[float, dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: is broken JSON") from error
    if not isinstance(content, dict):
        raise TraceError(f"{path}: is not a JSON object of windows")
    for start, kinds in content.items():
        if not is_number(start) or not isinstance(kinds, dict):
            raise TraceError(f"{path}: {start[:40]!r}: is not a window's start with histograms")
    return {float(start): kinds for start, kinds in content.items()}


def _parse_histogram(path: Path, start_s: float, kind: str, text: Any) -> _Histogram | None:
    """A histogram from the text of a Python dict (that is how the format has it); None if empty."""
    if not kind.endswith(("_tokens", "_count")):
        return None
    where = f"{path}: window {start_s:.0f}: {kind[:40]}"
    try:
        content = ast.literal_eval(text) if text else {}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise TraceError(f"{where}: is not the text of a dict of lengths") from error
    if not isinstance(content, dict):
        raise TraceError(f"{where}: is not the text of a dict of lengths")
    most = _MAX_ITEMS if kind.endswith("_count") else MAX_TOKENS
    for length, weight in content.items():
        whole = type(length) is int and 0 <= length <= most
        if not whole or type(weight) not in (int, float) or not 0 <= weight < 2**53:
            raise TraceError(f"{where}: holds something that is not a length with its weight")
    used = {length: weight for length, weight in content.items() if weight > 0}
    return _Histogram(list(used), list(used.values())) if used else None
