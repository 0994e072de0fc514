"""Compares results with the first of them, and says what the difference may be put down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from simserve.fidelity.compare.one_variable import (
    SettingDifference,
    differing_settings,
    missing_facts,
    one_sided_settings,
)
from simserve.fidelity.compare.result_source import Result
from simserve.fidelity.compare.step_shapes import ShapeRow, first_difference, shape_rows
from simserve.fidelity.logs.measured import METRICS, STATISTICS
from simserve.metrics.options import Scalar
from simserve.metrics.repetitions import summarise_repetitions

__all__ = ["Comparison", "Number", "NumberRow", "compare_results", "merge_repetitions"]

_LATENCIES = tuple(f"{statistic}_{metric}_ms" for metric in METRICS for statistic in STATISTICS)
_STANDARD = (
    *_LATENCIES,
    "request_throughput",
    "output_throughput",
    "num_preemptions",
    "num_steps",
)
"""What is compared of results that have these; of others, every number that both have."""
_CLASS, _COUNT = "class.", ".completed"
"""Around the name of a class of requests: the key of a number that each has."""


class Number(NamedTuple):
    """A value, and the interval of its mean if there are repetitions."""

    value: float
    interval: tuple[float, float] | None

    def overlaps(self, other: Number) -> bool:
        """Whether two intervals have a point in common; False if one is missing."""
        if self.interval is None or other.interval is None:
            return False
        return self.interval[0] <= other.interval[1] and other.interval[0] <= self.interval[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRow:
    """One number of both results."""

    key: str
    first: Number
    second: Number
    attributable: bool
    class_name: str | None = None
    """The class of requests that it is of; None: all requests."""

    @property
    def change(self) -> float | None:
        """second / first − 1; None if it cannot be attributed, or there is nothing to divide by."""
        if not self.attributable or not self.first.value:
            return None
        return self.second.value / self.first.value - 1.0

    @property
    def verdict(self) -> str:
        """`tie` or `differs` for repetitions, else nothing."""
        if self.first.interval is None or self.second.interval is None:
            return ""
        return "tie" if self.first.overlaps(self.second) else "differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two results."""

    first: Result
    second: Result
    differing: tuple[SettingDifference, ...]
    one_sided: tuple[str, ...]
    missing: Mapping[str, Sequence[str]]
    """What each result does not tell, by its name."""
    rows: tuple[NumberRow, ...]
    shapes: tuple[ShapeRow, ...]
    divergence: int | None
    """First step whose plans differ."""

    @property
    def telling_rows(self) -> list[NumberRow]:
        """All rows but those of a class that holds every request: they repeat others."""
        summaries = [*self.first.summaries, *self.second.summaries]
        return [
            row
            for row in self.rows
            if row.class_name is None
            or any(
                one.get(f"{_CLASS}{row.class_name}{_COUNT}") != one.get("completed")
                for one in summaries
            )
        ]

    @property
    def confounded(self) -> bool:
        """Whether more than one setting differs, so that none can be made responsible."""
        return len(self.differing) > 1

    @property
    def attributable(self) -> bool:
        """Whether both results tell what made them."""
        return not self.missing

    def misses(self, tolerances: Mapping[str, float]) -> list[str]:
        """Numbers that changed by more than allowed, or of which nothing can be said.

        `tolerances`: relative limits by key, such as `p50_ttft_ms`.
        """
        changes = {row.key: row.change for row in self.rows}
        return [
            key
            for key, limit in tolerances.items()
            if (change := changes.get(key)) is None or abs(change) > limit
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "first": self.first.name,
            "second": self.second.name,
            "engines": [self.first.engine, self.second.engine],
            "settings": [dict(self.first.settings), dict(self.second.settings)],
            "hit_tokens": [self.first.hit_tokens, self.second.hit_tokens],
            "confounded": self.confounded,
            "differing": [
                {"name": name, "values": [_plain(value) for value in values]}
                for name, values in self.differing
            ],
            "recorded_by_one": list(self.one_sided),
            "attributable": self.attributable,
            "missing": {name: list(facts) for name, facts in self.missing.items()},
            "numbers": [
                {
                    "key": row.key,
                    "values": [row.first.value, row.second.value],
                    "intervals": [row.first.interval, row.second.interval],
                    "change": row.change,
                    "verdict": row.verdict,
                }
                for row in self.rows
            ],
            "steps": [
                {
                    "shape": row.shape,
                    "steps": row.num_steps,
                    "mean_s": row.mean_s,
                    "change": row.change if self.attributable else None,
                }
                for row in self.shapes
            ],
            "first_different_step": self.divergence,
        }


def merge_repetitions(results: Sequence[Result]) -> list[Result]:
    """Results under the same settings of the same engine are repetitions of one."""
    merged: list[Result] = []
    for result in results:
        for place, known in enumerate(merged):
            told = not missing_facts(known) and not missing_facts(result)
            same = not differing_settings(known, result) and not one_sided_settings(known, result)
            if told and same:
                summaries = known.summaries + result.summaries
                merged[place] = replace(known, summaries=summaries)
                break
        else:
            merged.append(result)
    return merged


def compare_results(first: Result, second: Result) -> Comparison:
    """Compare two results, each with its repetitions."""
    if first.name == second.name:
        first, second = (
            replace(first, name=f"{first.name} (1)"),
            replace(second, name=f"{second.name} (2)"),
        )
    missing = {one.name: facts for one in (first, second) if (facts := missing_facts(one))}
    has_steps = first.steps is not None and second.steps is not None
    shapes: list[ShapeRow] = []
    divergence = None
    if has_steps:
        assert first.steps is not None
        assert second.steps is not None
        shapes = shape_rows(first.steps, second.steps)
        divergence = first_difference(first.steps, second.steps)
    return Comparison(
        first=first,
        second=second,
        differing=tuple(differing_settings(first, second)),
        one_sided=tuple(one_sided_settings(first, second)),
        missing=missing,
        rows=tuple(_rows(first, second, not missing)),
        shapes=tuple(shapes),
        divergence=divergence,
    )


def _rows(first: Result, second: Result, attributable: bool) -> list[NumberRow]:
    a, b = summarise_repetitions(first.summaries), summarise_repetitions(second.summaries)
    standard = [key for key in _STANDARD if key in a and key in b]
    # Intervals of repetitions are no numbers of their own.
    keys = standard or [key for one in first.summaries for key in one if key in b]
    of_class = dict.fromkeys(keys) | {
        f"{_CLASS}{name}.{key}": name for name in _class_names(a) for key in _LATENCIES
    }
    rows = []
    for key, name in of_class.items():
        one, other = _number(a, key), _number(b, key)
        if one is not None and other is not None:
            row = NumberRow(
                key=key, first=one, second=other, attributable=attributable, class_name=name
            )
            rows.append(row)
    return rows


def _class_names(summary: Mapping[str, Scalar]) -> list[str]:
    return [
        key.removeprefix(_CLASS).removesuffix(_COUNT)
        for key in summary
        if key.startswith(_CLASS) and key.endswith(_COUNT)
    ]


def _number(summary: Mapping[str, Scalar], key: str) -> Number | None:
    value = summary.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low, high = (summary.get(f"{key}_ci95_{side}") for side in ("low", "high"))
    if isinstance(low, float) and isinstance(high, float):
        return Number(float(value), (low, high))
    # Repetitions that all say the same leave no doubt about the mean.
    is_certain = summary.get("num_repetitions", 1) != 1
    return Number(float(value), (float(value), float(value)) if is_certain else None)


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None | list) else str(value)
