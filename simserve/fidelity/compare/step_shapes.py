"""Steps of two runs: where their plans part, and how long batches of one shape take in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.errors import counted
from simserve.fidelity.logs.vllm_log import StepLog

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ShapeRow", "StepShapes", "first_difference", "shape_rows"]

LEAST_STEPS = 3
"""A mean over fewer steps is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """What every step computed, and its time; shape [steps]."""

    num_scheduled: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_decode_tokens: NDArray[np.int64]
    num_preempted: NDArray[np.int64]
    duration_s: NDArray[np.float64]

    @classmethod
    def of_table(cls, table: pa.Table) -> StepShapes:
        """Of a run directory's steps; those without tokens ran no model, but are steps."""
        return cls(**{name: table[name].to_numpy() for name in cls.__dataclass_fields__})

    @classmethod
    def of_log(cls, log: StepLog) -> StepShapes:
        """Of a step log."""
        steps = log.steps
        of_step = np.repeat(np.arange(len(steps)), np.diff(steps.row_offsets))

        def total(values: NDArray[np.int64]) -> NDArray[np.int64]:
            sums = np.bincount(of_step, weights=values, minlength=len(steps))
            return sums.astype(np.int64)

        preempted = np.zeros(len(steps), dtype=np.int64)
        for step, victims in steps.preempted.items():
            preempted[step] = len(victims)
        return cls(
            num_scheduled=np.diff(steps.row_offsets),
            num_tokens=total(steps.num_tokens),
            num_decode_tokens=total((steps.num_tokens == 1).astype(np.int64)),
            num_preempted=preempted,
            duration_s=steps.duration_s,
        )

    def text(self, step: int) -> str:
        """One step in words."""
        if step >= len(self.duration_s):
            return "no such step"
        return (
            f"{counted(self.num_scheduled[step], 'request')}, "
            f"{counted(self.num_tokens[step], 'token')}, {self.num_preempted[step]} preempted"
        )


class ShapeRow(NamedTuple):
    """Steps of one shape of batch in both runs."""

    shape: str
    num_steps: tuple[int, int]
    mean_s: tuple[float, float]

    @property
    def change(self) -> float:
        """The second run's mean over the first's, minus 1."""
        return self.mean_s[1] / self.mean_s[0] - 1.0


def first_difference(a: StepShapes, b: StepShapes) -> int | None:
    """The first step in which the numbers of requests, tokens or preemptions differ."""
    count = min(len(a.duration_s), len(b.duration_s))
    differs = np.zeros(count, dtype=np.bool_)
    for name in ("num_scheduled", "num_tokens", "num_decode_tokens", "num_preempted"):
        differs |= getattr(a, name)[:count] != getattr(b, name)[:count]
    if differs.any():
        return int(differs.argmax())
    return None if len(a.duration_s) == len(b.duration_s) else count


def shape_rows(a: StepShapes, b: StepShapes) -> list[ShapeRow]:
    """Mean step times by shape, for shapes that both runs have several steps of.

    A shape is what kind of requests a batch holds, and its size within a factor of two.
    """
    labels_a, labels_b = _shapes(a), _shapes(b)
    rows = []
    for kind, size in sorted({*labels_a, *labels_b}):
        in_a, in_b = ([label == (kind, size) for label in some] for some in (labels_a, labels_b))
        if min(sum(in_a), sum(in_b)) < LEAST_STEPS:
            continue
        rows.append(
            ShapeRow(
                _label(kind, size),
                (sum(in_a), sum(in_b)),
                (float(a.duration_s[in_a].mean()), float(b.duration_s[in_b].mean())),
            )
        )
    return rows


def _label(kind: str, size: int) -> str:
    most = 2**size
    least = most // 2 + 1
    noun = "request" if kind == "decode" else "token"
    size_text = counted(most, noun) if least >= most else f"{least} to {counted(most, noun)}"
    return f"{kind}, {size_text}"


def _shapes(steps: StepShapes) -> list[tuple[str, int]]:
    """Kind of batch, and the least power of two that holds its tokens."""
    kinds = np.where(
        steps.num_decode_tokens == steps.num_tokens,
        "decode",
        np.where(steps.num_decode_tokens == 0, "prefill", "mixed"),
    )
    sizes = np.ceil(np.log2(np.maximum(steps.num_tokens, 1))).astype(int)
    some = steps.num_tokens > 0
    return [
        (str(kind), int(size)) if has else ("", 0)
        for kind, size, has in zip(kinds, sizes, some, strict=True)
    ]
