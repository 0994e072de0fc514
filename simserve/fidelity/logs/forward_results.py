"""Timed forward passes: results of `vllm bench forward`, or of `simserve bench step`.

Which batch a case is, is documented (docs.vllm.ai, `vllm bench forward`): `[N*]Q[@K][c][:D]`, N
requests of Q tokens with K tokens of KV, their own included. How results are laid out is not, so
that records are looked for by what they must hold: a batch and a time.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simserve.config.presets import gpu_names, model_names
from simserve.errors import TraceError, why_unreadable
from simserve.fidelity.logs.loaded_log import LoadedLog
from simserve.fidelity.logs.observations import Observations
from simserve.fidelity.logs.run_steps import StepRows, step_counts
from simserve.fidelity.logs.vllm_log import is_vllm_log

__all__ = ["load_forward_results"]

_PART = re.compile(r"(?:(\d+)\*)?(\d+)(?:@(\d+)(~\d+)?)?c?(:\d+)?")
_SHAPES = ("shape", "reqs", "requests", "case", "name")
"""Keys under which a batch may stand."""
_MICROSECONDS = ("median_us", "latency_us")
_VERSIONS = ("vllm_version", "version")
_MOST_REQUESTS = 100_000


class _Case(NamedTuple):
    requests: list[tuple[int, int]]
    """Tokens, and tokens computed before."""
    seconds: float


def load_forward_results(
    path: Path, *, model: str | None = None, gpu: str | None = None, engine: str | None = None
) -> LoadedLog:
    """Read a file of results as steps without any host time, in file order.

    `model` and `gpu` (names of presets) and `engine` (such as `vllm-0.33.0`) come before what the
    file says.

    Raises:
        TraceError: the file cannot be read; a record lacks a batch or a time, verifies drafts, or
            was measured at lengths that are not said; or model, GPU or engine are not known.
    """
    try:
        content = path.read_bytes()
        document = json.loads(content)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot read these results: {why_unreadable(error)}") from error
    if is_vllm_log(document):
        raise TraceError(f"{path}: is a step log; those are gzipped, and end in .json.gz")
    facts = _facts(document)
    if not (engine := engine or _engine(facts)):
        raise TraceError(f"{path}: names no version; say it with --engine, such as vllm-0.33.0")
    return LoadedLog(
        name=path.name.removesuffix(".json"),
        sha256=hashlib.sha256(content).hexdigest(),
        engine=engine,
        model=_preset(path, "model", model or facts.get("model"), model_names()),
        gpu=_preset(path, "gpu", gpu or facts.get("gpu"), gpu_names()),
        steps=_observations([_case(*record, facts) for record in _records(path, document)]),
        has_host=False,
    )


def _facts(document: object) -> dict[str, Any]:
    """What the file says of itself, at its top or one level below."""
    facts: dict[str, Any] = {}
    if isinstance(document, dict):
        for value in document.values():
            facts |= value if isinstance(value, dict) else {}
        facts |= document
    return facts


def _engine(facts: Mapping[str, Any]) -> str:
    if own := facts.get("simserve"):
        return f"simserve-{own}"
    return next((f"vllm-{facts[key]}" for key in _VERSIONS if key in facts), "")


def _preset(path: Path, what: str, text: object, known: list[str]) -> str:
    words = re.split(r"[^\w.-]+", str(text or "").lower())
    for name in sorted(known, key=len, reverse=True):
        if name in words:
            return name
    said = f"'{text}' names no preset" if text else "is not said"
    raise TraceError(f"{path}: {what} {said}; say which it is with --{what} ({', '.join(known)})")


def _records(path: Path, document: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each record and where it stands: items of the one list, or the objects by name."""
    rows: object = document
    if isinstance(document, dict):
        lists = [v for v in document.values() if isinstance(v, list) and v]
        named = [{"name": k, **v} for k, v in document.items() if _has_time(v)]
        rows = next((rows for rows in lists if isinstance(rows[0], dict)), named)
    if not isinstance(rows, list) or not rows:
        raise TraceError(
            f"{path}: holds no results: a list of records is needed, each with a batch "
            f"({' or '.join(_SHAPES)}) and a time ({' or '.join(_MICROSECONDS)})"
        )
    for number, record in enumerate(rows, 1):
        if not isinstance(record, dict):
            raise TraceError(f"{path}: record {number}: is no object")
        yield f"{path}: record {number}", record


def _has_time(value: object) -> bool:
    return isinstance(value, dict) and any(key in value for key in _MICROSECONDS)


def _case(where: str, record: Mapping[str, Any], facts: Mapping[str, Any]) -> _Case:
    own = "parts_ms" in record
    """Written by `simserve bench step`, whose K counts the tokens before."""
    texts = {key: record[key] for key in _SHAPES if isinstance(record.get(key), str)}
    for text in texts.values():
        shape = text.rpartition("=")[2].replace(" ", "")
        parts = [_PART.fullmatch(part) for part in shape.split(",")]
        if all(parts):
            break
    else:
        raise TraceError(
            f"{where}: no batch such as 32*1@8192 under {', '.join(_SHAPES)}; it has "
            f"{', '.join(record)}"
        )
    requests: list[tuple[int, int]] = []
    for part in filter(None, parts):
        count, new, read = int(part[1] or 1), int(part[2]), int(part[3] or (0 if own else part[2]))
        start = read if own else read - new
        if part[4]:
            raise TraceError(f"{where}: {shape}: shared KV is not told apart here; leave it out")
        if part[5]:
            raise TraceError(f"{where}: {shape}: drafts are not priced by a profile; leave it out")
        if not count or not new or start < 0 or len(requests) + count > _MOST_REQUESTS:
            raise TraceError(f"{where}: {shape}: '{part[0]}' is no batch")
        requests += [(new, start)] * count
    jitter = record.get("kv_len_jitter", facts.get("kv_len_jitter", 0))
    if jitter and not own and any(start for _, start in requests):
        raise TraceError(
            f"{where}: lengths were varied by {jitter} and are not said; measure with "
            "--kv-len-jitter 0"
        )
    return _Case(requests, _seconds(where, record, own))


def _seconds(where: str, record: Mapping[str, Any], own: bool) -> float:
    """The time of the forward pass: a number, or the median of several."""
    if own:
        found, unit_s = record["parts_ms"].get("forward"), 1e-3
    else:
        found = next((record[key] for key in _MICROSECONDS if key in record), None)
        unit_s = 1e-6
    if isinstance(found, dict):
        found = found.get("median", found.get("p50"))
    try:
        time = statistics.median(found if isinstance(found, list) else [found])
        if not 0.0 < time < float("inf"):
            raise ValueError
    except (TypeError, ValueError, statistics.StatisticsError):
        wanted = "parts_ms.forward" if own else " or ".join(_MICROSECONDS)
        raise TraceError(f"{where}: no positive time under {wanted}; it is {found!r}") from None
    return float(time) * unit_s


def _observations(cases: list[_Case]) -> Observations:
    rows = np.array(
        [(step, n, start) for step, case in enumerate(cases) for n, start in case.requests],
        dtype=np.int64,
    )
    step, num_tokens, start = rows.T
    none = np.zeros(len(cases), dtype=np.int64)
    counts = step_counts(
        StepRows(np.arange(len(rows)), step, num_tokens, start, np.zeros_like(step)), len(cases)
    )
    return Observations(
        duration_s=np.array([case.seconds for case in cases]),
        schedule_s=none.astype(np.float64),
        update_s=none.astype(np.float64),
        gap_s=np.full(len(cases), np.nan),
        gap_requests=none,
        gap_tokens=none,
        **counts,
        shared_kv_tokens=none,
        dealt=None,
    )
