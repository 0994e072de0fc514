"""What the sampling kernels are called with: settings and scratch of R rows, and sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from simserve_kernels.sampling_settings import SamplingColumns

__all__ = ["RowSettings", "Scratch", "Sizes", "scratch_of"]


class RowSettings(NamedTuple):
    """The columns of `SamplingColumns`; what is None is off for all rows."""

    temperature: torch.Tensor
    seeds: torch.Tensor
    steps: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None

    @classmethod
    def of(cls, columns: SamplingColumns) -> RowSettings:
        """The tensors of the columns."""
        return cls(**columns.tensors)


class Sizes(NamedTuple):
    """How rows are cut into programs, and what kernels are compiled for."""

    mixed: bool  # some rows are greedy
    ids: bool  # the survey stores which logit is the largest
    chunk: int  # logits of a program of the survey
    chunks: int  # of a row
    chunks_pad: int  # the next power of two, as are all pads
    lanes: int  # threads of a program of the survey
    tile: int  # logits whose weights are added up together
    tiles: int
    tiles_pad: int
    pivots: int  # at which the survey counts, the last of them below all; 0: no row is cut
    capacity: int  # logits around a cut that are collected
    scan: int  # logits read at a time where they do not hold the cut


class Scratch(NamedTuple):
    """What one kernel leaves for the next."""

    tops: torch.Tensor  # float32 [R, chunks]: the largest logit
    top_ids: torch.Tensor  # int32 [R, chunks]: its id
    sketches: torch.Tensor  # float32 [R, pivots + 1]: the pivots, and what weights are relative to
    surveys: torch.Tensor  # float32 [R, chunks, pivots]: count or weight above each pivot
    brackets: torch.Tensor  # float32 [R, 3]: low ≤ the cut < high, as is thought; the largest logit
    above: torch.Tensor  # int64 [R, tiles]: weight of what is ≥ high
    counts: torch.Tensor  # int32 [R, tiles]: how many are
    totals: torch.Tensor  # int64 [R, tiles]: weight of all that min-p keeps
    found: torch.Tensor  # int32 [R]: how many logits lie in the bracket
    between: torch.Tensor  # float32 [R, capacity]: these, as many as fit, in any order
    between_ids: torch.Tensor  # int32 [R, capacity]: their ids


def scratch_of(num_rows: int, sizes: Sizes, device: torch.device) -> Scratch:
    """Allocate scratch; nothing in it needs a value."""

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=device)

    return Scratch(
        tops=empty(torch.float32, sizes.chunks),
        top_ids=empty(torch.int32, sizes.chunks),
        sketches=empty(torch.float32, sizes.pivots + 1),
        surveys=empty(torch.float32, sizes.chunks, sizes.pivots),
        brackets=empty(torch.float32, 3),
        above=empty(torch.int64, sizes.tiles),
        counts=empty(torch.int32, sizes.tiles),
        totals=empty(torch.int64, sizes.tiles),
        found=empty(torch.int32),
        between=empty(torch.float32, sizes.capacity),
        between_ids=empty(torch.int32, sizes.capacity),
    )
