"""Choosing the next token of each row of logits: greedy, top-k, top-p, min-p, in mixed batches.

No row is sorted, nothing waits for the host, and the same calls may be replayed by a CUDA graph.
A token depends on its own row alone: its logits, settings, seed and step.

    survey   the largest logit of each chunk of the vocabulary           (all that greedy needs)
    sketch   before it, if a row has a top-k or top-p: a sample says where to look for the cut
    gather   whole weights by tile, and the logits around the cut
    draw     the exact cut, and the first token whose running sum of weights exceeds u · sum

`sampling_reference` is the same in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from simserve_kernels.checks import (
    check_float,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
    device_guard,
)
from simserve_kernels.sampling_draw import draw_kernel, pick_kernel
from simserve_kernels.sampling_passes import gather_kernel, sketch_kernel, survey_kernel
from simserve_kernels.sampling_scratch import RowSettings, Sizes, scratch_of
from simserve_kernels.sampling_settings import SamplingColumns

__all__ = ["SampledRows", "SamplingPlan", "plan_sampling", "sample"]

_MIN_CHUNK = 1024
_MAX_CHUNK = 4096
_MAX_CHUNKS = 256
_TILE = 1024
_MAX_RUN = 8
_ONE_WAVE = 128
"""Draws of eight warps that run at the same time: more of them would take turns."""
_FULL_GPU = 2048
"""Programs beyond which more of them bring nothing."""


class SamplingPlan(NamedTuple):
    """How rows are cut into programs. It changes how long a call takes, not what it returns."""

    chunk: int
    """Logits of a program of the survey."""
    tile: int
    """Logits whose weights are added up together, at most 1024."""
    run: int
    """Tiles of a program of the gathering."""
    pivots: int = 16
    """Logits at which the survey counts, the last of them −∞."""
    capacity: int = 4096
    """Logits around a cut that are collected."""
    scan: int = 2048
    """Logits read at a time where they do not hold the cut."""
    survey_warps: int = 4
    gather_warps: int = 4
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
    """Return a plan: small pieces for few rows, so that these fill a GPU too."""
    next_power = triton.next_power_of_2
    few = num_rows * triton.cdiv(vocab_size, _MAX_CHUNK) < _FULL_GPU // 8
    chunk = max(_MIN_CHUNK if few else _MAX_CHUNK, next_power(triton.cdiv(vocab_size, _MAX_CHUNKS)))
    tiles = num_rows * triton.cdiv(vocab_size, _TILE)
    run = min(_MAX_RUN, next_power(max(1, tiles // _FULL_GPU)))
    return SamplingPlan(
        chunk=chunk,
        tile=_TILE,
        run=run,
        gather_warps=4 if run == 1 else 2,
        draw_warps=8 if num_rows <= _ONE_WAVE else 4,
    )


def sample(
    logits: torch.Tensor, columns: SamplingColumns, *, plan: SamplingPlan | None = None
) -> SampledRows:
    """Return a token for each row of logits.

    NaN and what is below −10³⁰ count as −∞, what is above 10³⁰ as that; a row that has nothing
    above −∞ gives token 0. All tokens as likely as the k-th stay with top-k; of tokens as likely as
    the last that top-p needs, the first ones stay. Seed and step give 64 random bits by
    Philox-4×32-10.

    Grid: rows × chunks, then rows × runs of tiles; the sketch and the draw have a program a row.

    Args:
        logits: `[R, V]`, bfloat16, float16 or float32, after masks and penalties; rows may be
            strided.
        columns: the settings of the R rows, on the same device.
        plan: how to cut the rows; by default as suits their number.

    Raises:
        TypeError: dtypes that the kernels do not know.
        ValueError: shapes or devices that do not fit.
    """
    check_float("logits", logits)
    check_shape("logits", logits, ("num_rows", "vocab_size"))
    check_last_dim_contiguous("logits", logits)
    num_rows, vocab_size = logits.shape
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
    runs = triton.cdiv(tiles, plan.run)
    return Sizes(
        mixed=columns.path == "mixed",
        ids=columns.path != "random",
        chunk=plan.chunk,
        chunks=chunks,
        chunks_pad=triton.next_power_of_2(chunks),
        tile=plan.tile,
        tiles=tiles,
        tiles_pad=triton.next_power_of_2(tiles),
        run=plan.run,
        runs=runs,
        runs_pad=triton.next_power_of_2(runs),
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
    gather_kernel[(num_rows * sizes.runs,)](
        scratch, *rows, settings, sizes, num_warps=plan.gather_warps
    )
    draw_kernel[(num_rows,)](*out, scratch, *rows, settings, sizes, num_warps=plan.draw_warps)
