"""Recorded scheduler cases: gzipped JSON with a configuration, a workload, and what vLLM decided.

A case holds `config`, `workload`, `steps`, `requests` and `summary`; docs/conformance.md describes
every key. Only `config` and `workload` are read to simulate one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simserve.errors import TraceError
from simserve.fidelity.conform.case_format import first_problem
from simserve.segments import Segments
from simserve.types import TraceRequest

__all__ = ["Case", "case_requests", "check_case_keys"]

Case = dict[str, Any]

VOCABULARY = 32000


def check_case_keys(path: Path, case: object) -> Case:
    """The case that a file's document is.

    Raises:
        TraceError: it is not a case of format 1.
    """
    if not isinstance(case, dict):
        raise TraceError(f"{path}: not a case of format 1: it is no JSON object")
    missing = [
        key for key in ("config", "workload", "steps", "requests", "summary") if key not in case
    ]
    if missing or case.get("format") != 1:
        what = f"it lacks {', '.join(missing)}" if missing else f"format {case.get('format')!r}"
        if "workload" in missing:
            what += ". Nor is it a step log: those have config (with budget), requests and steps"
        raise TraceError(f"{path}: not a case of format 1: {what}")
    if problem := first_problem(case):
        raise TraceError(f"{path}: not a case of format 1: {problem}")
    return case


def case_requests(case: Case) -> list[TraceRequest]:
    """The requests of a case in order of arrival. Prompts and outputs are literal tokens."""
    requests = [_request(entry) for entry in case["workload"]["requests"]]
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(entry: dict[str, Any]) -> TraceRequest:
    prompt = tuple(token for part in entry["prompt"] for token in _part_tokens(part))
    output = _output_tokens(entry["id"], entry["out"])
    return TraceRequest(
        request_id=str(entry["id"]),
        arrival_s=entry["t"],
        prompt=_literal(prompt),
        output_len=entry["out"],
        output=_literal(output),
        priority=entry.get("prio", 0),
        cache_salt=entry.get("salt"),
        prompt_logprobs=bool(entry.get("plp", 0)),
    )


def _literal(tokens: tuple[int, ...]) -> Segments:
    return ((tokens, len(tokens)),)


def _part_tokens(part: list[Any]) -> tuple[int, ...]:
    """`[g, n]`: first n tokens of segment g; `["o", i, n]`: first n output tokens of request i."""
    if part[0] == "o":
        return _output_tokens(part[1], part[2])
    first = part[0] * 1000003
    return tuple((first + j * 7919) % VOCABULARY for j in range(part[1]))


def _output_tokens(request: int, count: int) -> tuple[int, ...]:
    return tuple((request * 7919 + j * 104729) % VOCABULARY for j in range(count))
