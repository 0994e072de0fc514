"""Step logs of a real vLLM: one gzipped JSON object a run, checked and turned into plain records.

docs/log-format.md describes every key. Times in a file are microseconds (arrivals seconds) since
the start of the run; here all are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from simserve.errors import TraceError
from simserve.fidelity.logs.document import load_document
from simserve.types import TraceRequest

__all__ = [
    "LogConfig",
    "LogSteps",
    "StepLog",
    "is_vllm_log",
    "parse_vllm_log",
    "preset_in",
    "read_vllm_log",
]

MAX_MODEL_LEN = 40960
"""Of the engine in these logs; a file of another engine says its own."""
_COLD_CACHE = ("reset_before", True)
"""What every record is taken to be, so that it may say so."""
_CLOCKS = ("start", "duration", "schedule", "update")
_CONFIG = ("budget", "threshold", "max_num_seqs", "max_model_len", "block_size", "num_free_blocks",
           "prefix_caching", "enable_chunked_prefill", "policy", "scheduler_reserve_full_isl",
           "async_scheduling")  # fmt: skip
_US = 1e-6
_MAX_US = 2**53
_MAX_BLOCK_SIZE, _MAX_BLOCKS, _MAX_LENGTH = 65536, 10**8, 10**9
_ROUNDING_US = 2
"""Start and duration are rounded apart: an end may come out a microsecond or two late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The engine's effective settings, under vLLM's names."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_gpu_blocks: int
    """With the null block."""
    enable_prefix_caching: bool
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    scheduler_reserve_full_isl: bool | None = None
    """None: as the engine has it."""
    not_read: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What else the file says of the engine; here it has no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSteps:
    """The engine's steps as columns; one row a request and step, in the order scheduled.

    Step j has the rows `row_offsets[j]` to `row_offsets[j + 1]`.
    """

    start_s: NDArray[np.float64]
    """Shape [steps], as the next four."""
    end_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    """The whole step as the client sees it; the next two are parts of it."""
    schedule_s: NDArray[np.float64]
    update_s: NDArray[np.float64]
    row_offsets: NDArray[np.int64]
    """Shape [steps + 1]."""
    request: NDArray[np.int64]
    """Place in `StepLog.requests`; shape [rows], as the next two."""
    num_tokens: NDArray[np.int64]
    """Tokens scheduled."""
    num_computed: NDArray[np.int64]
    """Tokens computed before the step."""
    preempted: Mapping[int, tuple[int, ...]]
    """Requests preempted in a step, for the steps that have some."""

    def __len__(self) -> int:
        return len(self.start_s)

    def rows(self, step: int) -> tuple[tuple[int, int, int], ...]:
        """(request, tokens, computed before) of each request in a step."""
        place = slice(self.row_offsets[step], self.row_offsets[step + 1])
        columns = (self.request, self.num_tokens, self.num_computed)
        return tuple(zip(*(column[place].tolist() for column in columns), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """What one file holds."""

    path: Path
    name: str
    engine: str
    """Such as `vllm-0.20.2`; empty if the file does not say."""
    gpu: str
    model: str
    config: LogConfig
    requests: tuple[TraceRequest, ...]
    """In file order; ids are the places in it as text, `arrival_s` is when a request was due,
    `output_len` what came out, if anything did."""
    asked_lens: tuple[int, ...]
    """Output tokens asked for; shape [requests]."""
    added_s: NDArray[np.float64]
    """When the engine's loop handed each request over; shape [requests]."""
    token_times_s: tuple[NDArray[np.float64], ...]
    """When each output token of each request came out."""
    steps: LogSteps


def is_vllm_log(document: object) -> bool:
    """Whether a decoded JSON file looks like a step log."""
    return (
        isinstance(document, dict)
        and {"config", "requests", "steps"} <= document.keys()
        and (isinstance(document["config"], dict) and "budget" in document["config"])
    )


def read_vllm_log(path: Path) -> StepLog:
    """Read one file.

    Raises:
        TraceError: the file cannot be read, or a value is missing or impossible; the message names
            file, row and field.
    """
    return parse_vllm_log(path, load_document(path))


def parse_vllm_log(path: Path, document: Any) -> StepLog:
    """The same of a document that was read from `path` already."""
    if not is_vllm_log(document):
        raise TraceError(
            f"{path}: not a step log: it needs `config` (with `budget`), `requests` and `steps`"
        )
    return _Reader(path).log(document)


def preset_in(text: str, known: Sequence[str]) -> str | None:
    """The longest of some presets' names that is a word of a log's `model` or `gpu`.

    >>> preset_in("Llama-3.1-8B shape, dummy weights", ["llama-3.1-8b", "llama-3.1-70b"])
    'llama-3.1-8b'
    """
    words = text.lower().replace(",", " ").split()
    return max((name for name in known if name in words), key=len, default=None)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, document: Mapping[str, Any]) -> StepLog:
        requests, added_s, token_times_s = self._requests(document["requests"])
        asked_lens = tuple(entry["out"] for entry in document["requests"])
        lengths = [r.prompt_len + asked for r, asked in zip(requests, asked_lens, strict=True)]
        steps = self._steps(document["steps"], lengths)
        added_s = self._checked_added(requests, added_s, steps)
        return StepLog(
            path=self._path,
            name=self._text(document, "name", self._path.name.removesuffix(".json.gz")),
            engine=self._text(document, "engine"),
            gpu=self._text(document, "gpu"),
            model=self._text(document, "model"),
            config=self._config(document["config"]),
            requests=requests,
            asked_lens=asked_lens,
            added_s=added_s,
            token_times_s=token_times_s,
            steps=steps,
        )

    def _fail(self, where: str, field: str, message: str) -> NoReturn:
        raise TraceError(f"{self._path}: {where}: {field}: {message}")

    def _text(self, document: Mapping[str, Any], field: str, default: str = "") -> str:
        value = document.get(field, default)
        if not isinstance(value, str):
            self._fail("log", field, f"must be text, is {_short(value)}")
        return value

    def _int(self, where: str, field: str, value: Any, least: int = 0, most: int = _MAX_US) -> int:
        if type(value) is not int or not least <= value <= most:
            too_large = type(value) is int and value > most
            limit = f"up to {most}" if too_large else f"of at least {least}"
            self._fail(where, field, f"must be a whole number {limit}, is {_short(value)}")
        return value

    # -- config ----------------------------------------------------------------------------------

    def _config(self, entry: Mapping[str, Any]) -> LogConfig:
        def number(key: str, least: int = 1, default: int | None = None) -> int:
            return self._int("config", key, entry.get(key, default), least)

        def flag(key: str, default: bool | None) -> Any:
            value = entry.get(key, default)
            if not isinstance(value, bool) and value is not default:
                self._fail("config", key, f"must be true or false, is {_short(value)}")
            return value

        policy = entry.get("policy", "fcfs")
        if policy not in ("fcfs", "priority"):
            self._fail("config", "policy", f"must be 'fcfs' or 'priority', is {_short(policy)}")
        if flag("async_scheduling", False):
            self._fail("config", "async_scheduling", "must be false: steps are not to overlap")
        return LogConfig(
            max_num_batched_tokens=number("budget"),
            long_prefill_token_threshold=number("threshold", 0, 0),
            max_num_seqs=number("max_num_seqs"),
            max_model_len=number("max_model_len", 1, MAX_MODEL_LEN),
            block_size=self._int(
                "config", "block_size", entry.get("block_size"), 1, _MAX_BLOCK_SIZE
            ),
            num_gpu_blocks=self._int(
                "config", "num_free_blocks", entry.get("num_free_blocks"), 1, _MAX_BLOCKS
            )
            + 1,
            enable_prefix_caching=flag("prefix_caching", True),
            enable_chunked_prefill=flag("enable_chunked_prefill", True),
            policy=policy,
            scheduler_reserve_full_isl=flag("scheduler_reserve_full_isl", None),
            not_read={
                key: value
                for key, value in entry.items()
                if key not in _CONFIG and (key, value) != _COLD_CACHE
            },
        )

    # -- requests --------------------------------------------------------------------------------

    def _requests(
        self, entries: Any
    ) -> tuple[tuple[TraceRequest, ...], NDArray[np.float64], tuple[NDArray[np.float64], ...]]:
        if not isinstance(entries, list) or not entries:
            self._fail("requests", "requests", "must be a list of at least one request")
        requests, added, times = [], [], []
        for i, entry in enumerate(entries):
            where = f"requests[{i}]"
            if not isinstance(entry, dict):
                self._fail(where, "request", f"must be an object, is {_short(entry)}")
            request = self._request(where, str(i), entry)
            added.append(self._int(where, "added", entry.get("added")) * _US)
            times.append(self._token_times(where, entry.get("times"), request))
            # An end of sequence, an abort or the record's end: what came out is all there was.
            requests.append(replace(request, output_len=len(times[-1]) or request.output_len))
        return tuple(requests), np.array(added), tuple(times)

    def _checked_added(
        self, requests: Sequence[TraceRequest], added_s: NDArray[np.float64], steps: LogSteps
    ) -> NDArray[np.float64]:
        """The times, none of which rounding has left behind the step that has the request."""
        due_s = np.array([request.arrival_s for request in requests])
        seen, rows = np.unique(steps.request, return_index=True)
        first = np.searchsorted(steps.row_offsets, rows, side="right") - 1
        start_s = np.full(len(requests), np.inf)
        start_s[seen] = steps.start_s[first]
        rounding_s = _ROUNDING_US * _US
        for i in np.flatnonzero((added_s < due_s - rounding_s) | (added_s > start_s + rounding_s)):
            early = added_s[i] < due_s[i]
            what = "its arrival" if early else "the start of the first step that schedules it"
            self._fail(f"requests[{i}]", "added", f"lies {'before' if early else 'after'} {what}")
        checked_s: NDArray[np.float64] = np.minimum(added_s, start_s)
        return checked_s

    def _request(self, where: str, request_id: str, entry: Mapping[str, Any]) -> TraceRequest:
        arrival_s = entry.get("arrival")
        if type(arrival_s) not in (int, float) or not isfinite(arrival_s) or arrival_s < 0:  # type: ignore[arg-type, operator]
            self._fail(where, "arrival", f"must be seconds of at least 0, is {_short(arrival_s)}")
        parts = entry.get("segs")
        if not isinstance(parts, list) or not parts:
            self._fail(where, "segs", "must be a list of [segment id, length] parts")
        prompt = []
        for part in parts:
            if not isinstance(part, list) or len(part) != 2:
                self._fail(where, "segs", f"must be [segment id, length], is {_short(part)}")
            length = self._int(where, "segs", part[1], 1, _MAX_LENGTH)
            prompt.append((self._int(where, "segs", part[0]), length))
        return TraceRequest(
            request_id=request_id,
            arrival_s=float(arrival_s),  # type: ignore[arg-type]
            prompt=tuple(prompt),
            output_len=self._int(where, "out", entry.get("out"), 1, _MAX_LENGTH),
            priority=self._int(where, "priority", entry.get("priority", 0), -_MAX_US),
        )

    def _token_times(self, where: str, values: Any, request: TraceRequest) -> NDArray[np.float64]:
        times, most = self._numbers(where, "times", values), request.output_len
        if len(times) > most:
            self._fail(where, "times", f"{len(times)} token times for out = {most} tokens")
        if (np.diff(times) < 0).any():
            self._fail(where, "times", "must not decrease")
        if len(times) and times[0] * _US < request.arrival_s - _ROUNDING_US * _US:
            self._fail(where, "times", f"{times[0]} us lies before the arrival")
        return _seconds(times)

    def _numbers(self, where: str, field: str, values: Any) -> NDArray[np.int64]:
        if not isinstance(values, list):
            self._fail(where, field, f"must be a list of whole numbers, is {_short(values)}")
        for value in values:
            self._int(where, field, value)
        return np.array(values, dtype=np.int64)

    # -- steps -----------------------------------------------------------------------------------

    def _steps(self, entries: Any, lengths: Sequence[int]) -> LogSteps:
        """`lengths`: the most tokens that each request can have, its prompt included."""
        if not isinstance(entries, list) or not entries:
            self._fail("steps", "steps", "must be a list of at least one step")
        clocks: list[list[int]] = []
        rows: list[Sequence[int]] = []
        offsets, preempted = [0], {}
        places: list[int] = []
        for j, entry in enumerate(entries):
            where = f"steps[{j}]"
            if not isinstance(entry, list) or len(entry) != 6:
                self._fail(where, "step", f"must be a list of 6 entries, is {_short(entry)}")
            for name, value in zip(_CLOCKS, entry[:4], strict=True):
                self._int(where, name, value, 1 if name == "duration" else 0)
            of_step = self._rows(where, entry[4], lengths)
            victims = self._numbers(where, "preempted", entry[5]).tolist()
            for i, victim in enumerate(victims):
                if victim >= len(lengths) or victim in victims[:i]:
                    what = f"request {victim} is not one of {len(lengths)}, or stands there twice"
                    self._fail(where, "preempted", what)
            if entry[2] + entry[3] > entry[1] + _ROUNDING_US:
                self._fail(where, "duration", "is shorter than schedule and update together")
            if not of_step and not victims:
                continue  # the engine was asked, and had nothing to do
            if victims:
                preempted[len(places)] = tuple(victims)
            places.append(j)
            clocks.append(entry[:4])
            rows += of_step
            offsets.append(len(rows))
        if not places:
            self._fail("steps", "steps", "must hold a step that scheduled something")
        clock_us = np.array(clocks, dtype=np.int64)
        ends_us = clock_us[:, 0] + clock_us[:, 1]
        if (early := np.flatnonzero(clock_us[1:, 0] < ends_us[:-1] - _ROUNDING_US)).size:
            place = places[early[0] + 1]
            self._fail(f"steps[{place}]", "start", "lies before the end of the step before")
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return LogSteps(
            start_s=_seconds(clock_us[:, 0]),
            end_s=_seconds(ends_us),
            duration_s=_seconds(clock_us[:, 1]),
            schedule_s=_seconds(clock_us[:, 2]),
            update_s=_seconds(clock_us[:, 3]),
            row_offsets=np.array(offsets, dtype=np.int64),
            request=columns[:, 0].copy(),
            num_tokens=columns[:, 1].copy(),
            num_computed=columns[:, 2].copy(),
            preempted=preempted,
        )

    def _rows(self, where: str, rows: Any, lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        if not isinstance(rows, list):
            self._fail(where, "rows", f"must be a list, is {_short(rows)}")
        for row in rows:
            if not isinstance(row, list) or [type(value) for value in row] != [int, int, int]:
                self._fail(where, "rows", f"must be [request, tokens, computed], is {_short(row)}")
            if not 0 <= row[0] < len(lengths):
                self._fail(where, "rows", f"request {row[0]} is not one of {len(lengths)}")
            if row[1] < 1 or row[2] < 0 or row[1] + row[2] > lengths[row[0]]:
                most = f"and at most {lengths[row[0]]} (prompt and out) together"
                self._fail(where, "rows", f"tokens must be positive, {most}, are {_short(row)}")
        if len({row[0] for row in rows}) < len(rows):
            self._fail(where, "rows", "a request must not be scheduled twice in a step")
        return rows


def _seconds(us: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(us * _US, dtype=np.float64)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
