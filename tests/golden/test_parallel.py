"""n > 1 as the workload makes it: what vLLM decided for such requests comes out again."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest

from simserve.fidelity.conform import check
from simserve.types import TraceRequest
from simserve.workload.groups import Grouped
from simserve.workload.siblings import ByClass
from simserve.workload.source import OpenLoop
from tests.golden.cases import load


class Numbered:
    """Gives requests the numbers that the record calls them by, in the order they come."""

    def __init__(self, workload: Grouped) -> None:
        self._workload = workload
        self._names: list[str] = []
        self.num_requests = None

    def next_arrival(self) -> float | None:
        return self._workload.next_arrival()

    def take(self) -> TraceRequest:
        request = self._workload.take()
        self._names.append(request.request_id)
        return replace(request, request_id=str(len(self._names) - 1))

    def finished(self, request_id: str, now_s: float, completed: bool = True) -> None:
        self._workload.finished(self._names[int(request_id)], now_s, completed)


def asked_for(requests: list[TraceRequest]) -> list[TraceRequest]:
    """What users asked for: neighbours with one prompt and arrival were one request."""
    groups = groupby(requests, key=lambda one: (one.arrival_s, one.prompt, one.output_len))
    return [replace(first, n=1 + len(rest)) for first, *rest in (list(g) for _, g in groups)]


def test_recorded_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    case = load("g43")
    wanted: list[TraceRequest] = []

    def workload(requests: list[TraceRequest], num_requests: int) -> Numbered:
        wanted.extend(asked_for(requests))
        return Numbered(Grouped(OpenLoop(wanted), ByClass(methods={})))

    monkeypatch.setattr(check, "OpenLoop", workload)
    got = check.simulate_case(case)
    assert [check._first_difference(case, got)] == [None]
    assert len(wanted) < len(case["requests"]) == sum(one.n for one in wanted)
