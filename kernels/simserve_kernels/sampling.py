"""Choosing the next token of each row of logits: greedy, top-k, top-p, min-p, in mixed batches.

No row is sorted, nothing waits for the host, and the same calls may be replayed by a CUDA graph.
A token depends on its own row alone: its logits, settings, seed and step.

    survey   the largest logit of each chunk of the vocabulary           (all that greedy needs)
    sketch   before it, if a row has a top-k or top-p: a sample says at which logits to count
    guess    after it: what lies above these says between which two logits the cut is
    gather   whole weights by tile, and the logits between these two
    draw     the exact cut, and the first token whose running sum of weights exceeds u · sum

`sampling_reference` is the same in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from simserve_kernels.checks import check_logits, check_same_device, device_guard
from simserve_kernels.sampling_draw import draw_kernel, pick_kernel
from simserve_kernels.sampling_guess import guess_kernel
from simserve_kernels.sampling_passes import gather_kernel, sketch_kernel, survey_kernel
from simserve_kernels.sampling_scratch import RowSettings, Sizes, scratch_of
from simserve_kernels.sampling_settings import SamplingColumns

__all__ = ["SampledRows", "SamplingPlan", "plan_sampling", "sample"]

_CHUNK = 1024
_MAX_CHUNKS = 256
_TILE = 1024
_FEW_CHUNKS = 1024
"""Of so many at most, each is shared by four warps; of more of them, each takes one warp."""


class SamplingPlan(NamedTuple):
    """How rows are cut into programs. It changes how long a call takes, not what it returns."""

    chunk: int
    """Logits of a program of the survey, at least one a thread."""
    tile: int
    """Logits whose weights are added up together, from 128 to 1024."""
    pivots: int = 16
    """Logits at which the survey counts, the last of them below all."""
    capacity: int = 2048
    """Logits around a cut that are collected."""
    scan: int = 8192
    """Logits read at a time where they do not hold the cut."""
    survey_warps: int = 4
    """A program of the gathering has one."""
    draw_warps: int = 8


class SampledRows(NamedTuple):
    """The tokens of R rows, and where the drawn ones were cut."""

    tokens: torch.Tensor
    """int64 `[R]`."""
    cuts: torch.Tensor
    """float32 `[R]`: the smallest logit that was left to draw from; undefined in greedy rows."""
    last_ties: torch.Tensor
    """int32 `[R]`: of tokens with that logit, those up to this id were left; 2³¹ − 1: all."""


def plan_sampling(num_rows: int, vocab_size: int) -> SamplingPlan:
    """Return a plan: with few rows, more warps share a piece, so that these fill a GPU too."""
    chunk = max(_CHUNK, triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_CHUNKS)))
    few = num_rows * triton.cdiv(vocab_size, chunk) <= _FEW_CHUNKS
    return SamplingPlan(
        chunk=chunk,
        tile=_TILE,
        survey_warps=4 if few else min(8, chunk // _CHUNK),
    )


def sample(
    logits: torch.Tensor, columns: SamplingColumns, *, plan: SamplingPlan | None = None
) -> SampledRows:
    """Return a token for each row of logits.

    NaN and what is below −10³⁰ count as −∞, what is above 10³⁰ as that; a row that has nothing
    above −∞ gives token 0. All tokens as likely as the k-th stay with top-k; of tokens as likely as
    the last that top-p needs, the first ones stay. Seed and step give 64 random bits by
    Philox-4×32-10.

    Grid: rows × chunks, then rows × tiles; sketch, guess and draw have a program a row.

    Args:
        logits: `[R, V]`, bfloat16, float16 or float32, after masks and penalties; rows may be
            strided.
        columns: the settings of the R rows, on the same device.
        plan: how to cut the rows; by default as suits their number.

    Raises:
        TypeError: dtypes that the kernels do not know.
        ValueError: shapes or devices that do not fit.
    """
    num_rows, vocab_size = check_logits(logits)
    if not 0 < vocab_size < 2**31:
        raise ValueError(f"logits has {vocab_size} columns: it must be from 1 to 2³¹ − 1")
    columns.check(num_rows)
    check_same_device({"logits": logits, **columns.tensors})
    out = SampledRows(
        _empty(logits, torch.int64), _empty(logits, torch.float32), _empty(logits, torch.int32)
    )
    if num_rows:
        with device_guard(logits):
            _launch(logits, columns, out, plan or plan_sampling(num_rows, vocab_size))
    return out


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(like.shape[0], dtype=dtype, device=like.device)


def _sizes(vocab_size: int, columns: SamplingColumns, plan: SamplingPlan) -> Sizes:
    is_cut = columns.top_k is not None or columns.top_p is not None
    cuts = columns.path != "greedy" and is_cut
    chunks, tiles = triton.cdiv(vocab_size, plan.chunk), triton.cdiv(vocab_size, plan.tile)
    return Sizes(
        mixed=columns.path == "mixed",
        ids=columns.path != "random",
        chunk=plan.chunk,
        chunks=chunks,
        chunks_pad=triton.next_power_of_2(chunks),
        lanes=32 * plan.survey_warps,
        tile=plan.tile,
        tiles=tiles,
        tiles_pad=triton.next_power_of_2(tiles),
        pivots=plan.pivots if cuts else 0,
        capacity=plan.capacity if cuts else 0,
        scan=plan.scan,
    )


def _launch(
    logits: torch.Tensor, columns: SamplingColumns, out: SampledRows, plan: SamplingPlan
) -> None:
    num_rows, vocab_size = logits.shape
    sizes = _sizes(vocab_size, columns, plan)
    scratch = scratch_of(num_rows, sizes, logits.device)
    rows = (logits, logits.stride(0), vocab_size)
    settings = RowSettings.of(columns)
    if sizes.pivots:
        sketch_kernel[(num_rows,)](scratch, *rows, sizes, num_warps=4)
    survey_kernel[(num_rows * sizes.chunks,)](
        scratch, *rows, settings, sizes, num_warps=plan.survey_warps
    )
    if columns.path == "greedy":
        pick_kernel[(num_rows,)](out.tokens, scratch, sizes, num_warps=1)
        return
    if sizes.pivots:
        guess_kernel[(num_rows,)](scratch, vocab_size, settings, sizes, num_warps=1)
    gather_kernel[(num_rows * sizes.tiles,)](scratch, *rows, settings, sizes, num_warps=1)
    draw_kernel[(num_rows,)](*out, scratch, *rows, settings, sizes, num_warps=plan.draw_warps)
