"""Every case recorded from vLLM v0.11.0 is met in every field, and taking runs of equal steps at
once changes nothing of it: bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simserve.fidelity.conform import check
from simserve.fidelity.conform.case_record import CaseRecord
from simserve.fidelity.conform.cases import Case
from simserve.kv.manager import PagedKVCacheManager
from simserve.metrics.recorder import RunRecorder
from simserve.protocols import StepRecord
from simserve.sched.base import BaseScheduler
from simserve.types import Request, TraceRequest
from tests.engine.rig import Log, World, state_of
from tests.golden.cases import CASES, load, load_case, world_of


class Both(Log):
    """A log, and the recorder of the metrics beside it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.recorder = RunRecorder(
            num_gpu_blocks=config["num_gpu_blocks"],
            block_size=config["block_size"],
            enable_prefix_caching=config["enable_prefix_caching"],
        )
        self.num_records = 0

    def arrived(self, request: TraceRequest, now_s: float) -> None:
        super().arrived(request, now_s)
        self.recorder.arrived(request, now_s)

    def rejected(self, request: TraceRequest, reason: str, now_s: float) -> None:
        self.recorder.rejected(request, reason, now_s)

    def aborted(self, request: Request, now_s: float) -> None:
        self.recorder.aborted(request, now_s)

    def stepped(self, record: StepRecord) -> None:
        super().stepped(record)
        self.recorder.stepped(record)
        self.num_records += 1

    def ended(self, status: str, now_s: float, unfinished: Sequence[Request]) -> None:
        self.recorder.ended(status, now_s, unfinished)


class Conforming(CaseRecord):
    """What conformance is judged by; it hands all that it is told on to `log`."""

    def __init__(
        self,
        config: dict[str, Any],
        requests: Sequence[TraceRequest],
        scheduler: BaseScheduler,
        kv: PagedKVCacheManager,
    ) -> None:
        super().__init__(config, requests, scheduler, kv)
        self.log, self.kv = Both(config), kv

    def arrived(self, request: TraceRequest, now_s: float) -> None:
        super().arrived(request, now_s)
        self.log.arrived(request, now_s)

    def rejected(self, request: TraceRequest, reason: str, now_s: float) -> None:
        super().rejected(request, reason, now_s)
        self.log.rejected(request, reason, now_s)

    def aborted(self, request: Request, now_s: float) -> None:
        super().aborted(request, now_s)
        self.log.aborted(request, now_s)

    def stepped(self, record: StepRecord) -> None:
        super().stepped(record)
        self.log.stepped(record)

    def ended(self, status: str, now_s: float, unfinished: Sequence[Request]) -> None:
        super().ended(status, now_s, unfinished)
        self.log.ended(status, now_s, unfinished)


def leaping(case: Case) -> tuple[World, Both]:
    log = Both(case["config"])
    world = world_of(case, leap=True, log=log).run()
    log.ended(world.engine.status, world.engine.now, world.scheduler.unfinished())
    return world, log


def columns_of(log: Both) -> dict[str, Any]:
    """All columns that the metrics are made of."""
    data = log.recorder.data()
    found: dict[str, Any] = {}
    for name in ("requests", "steps"):
        table = getattr(data, name)
        found |= {f"{name}.{f.name}": getattr(table, f.name) for f in fields(table)}
    found |= {f"parts.{name}": column for name, column in data.steps.parts.items()}
    del found["steps.parts"]
    offsets, gaps = data.times.itl_lists()
    times = data.times
    return found | {
        "itl": gaps,
        "itl offsets": offsets,
        "first": times.first_token_s,
        "last": times.last_token_s,
        "tokens": times.num_tokens,
        "end": (data.status, data.end_s, data.num_ghosts, data.num_resumed),
        "note": data.prefix_cache_note,
    }


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> Any:
    """Small enough to be shown."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i, a, b
    return None if len(one) == len(other) else (len(one), len(other))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.split(".")[0])
def test_case_conforms_and_leaps_change_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[Conforming] = []

    def record(*args: Any) -> Conforming:
        records.append(Conforming(*args))
        return records[-1]

    monkeypatch.setattr(check, "CaseRecord", record)
    outcome = check.check_case(path)
    assert outcome.difference is None, str(outcome.difference)
    assert outcome.num_steps > 0
    assert outcome.num_requests > 0

    (single,) = records
    case = load_case(path)
    world, log = leaping(case)
    assert first_difference(log.steps, single.log.steps) is None
    assert first_difference([*log.token_s.items()], [*single.log.token_s.items()]) is None
    assert [a == b for a, b in zip(world.state, state_of(single.kv), strict=True)] == [True] * 5
    assert world.engine.num_steps == single.log.num_records == len(single.log.steps)
    assert outcome.num_steps == len(single.log.steps)
    mine, theirs = columns_of(log), columns_of(single.log)
    assert mine.keys() == theirs.keys()
    for name, column in mine.items():
        expected = theirs[name]
        if isinstance(column, np.ndarray) and column.dtype.kind == "f":
            assert np.array_equal(column, expected, equal_nan=True), name
        else:
            assert np.all(column == expected), name


@pytest.mark.parametrize(("name", "at_most"), [("g02", 0.5), ("g38", 0.6)])
def test_leaps_do_happen(name: str, at_most: float) -> None:
    _, log = leaping(load(name))
    assert log.num_records < at_most * len(log.steps)
