"""Taking runs of equal steps at once changes nothing: bit for bit, for every recorded case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simserve.fidelity.cases import load_case
from simserve.metrics.recorder import RunRecorder
from simserve.protocols import StepRecord
from simserve.types import Request, TraceRequest
from tests.engine.rig import Log, World
from tests.golden.cases import CASES, world_of

SYNC = [path for path in CASES if not load_case(path)["config"]["async_scheduling"]]


class Both(Log):
    """A log, and the recorder of the metrics beside it."""

    def __init__(self, recorder: RunRecorder) -> None:
        super().__init__()
        self.recorder = recorder
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


def simulated(path: Path, leap: bool) -> tuple[World, Both]:
    case = load_case(path)
    config = case["config"]
    log = Both(
        RunRecorder(
            num_gpu_blocks=config["num_gpu_blocks"],
            block_size=config["block_size"],
            enable_prefix_caching=config["enable_prefix_caching"],
        )
    )
    world = world_of(case, leap, log).run()
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


@pytest.mark.parametrize("path", SYNC, ids=lambda path: path.name.split(".")[0])
def test_leaps_change_nothing(path: Path) -> None:
    leaping, one = simulated(path, leap=True)
    stepping, other = simulated(path, leap=False)

    assert first_difference(one.steps, other.steps) is None
    assert first_difference([*one.token_s.items()], [*other.token_s.items()]) is None
    assert [a == b for a, b in zip(leaping.state, stepping.state, strict=True)] == [True] * 5
    assert leaping.engine.num_steps == stepping.engine.num_steps == len(other.steps)
    assert other.num_records == len(other.steps)
    mine, theirs = columns_of(one), columns_of(other)
    assert mine.keys() == theirs.keys()
    for name, column in mine.items():
        expected = theirs[name]
        if isinstance(column, np.ndarray) and column.dtype.kind == "f":
            assert np.array_equal(column, expected, equal_nan=True), name
        else:
            assert np.all(column == expected), name


def test_leaps_do_happen() -> None:
    (path,) = [path for path in SYNC if path.name.startswith("g02")]
    _, log = simulated(path, leap=True)
    assert log.num_records < len(log.steps) / 2
