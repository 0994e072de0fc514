"""Log-probabilities beside the chosen tokens, of those rows of logits that ask for them.

    add_up   the largest logit of each chunk of the vocabulary, sums of weights, ranks
    pick     the likeliest tokens one after the other: a chunk that gives one is read again

`sampling_reference.store_logprobs` is the same in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from simserve_kernels.checks import (
    check_dtype,
    check_logits,
    check_same_device,
    check_shape,
    device_guard,
)
from simserve_kernels.sampling_passes import LARGEST_ID
from simserve_kernels.sampling_settings import TokenLogprobs
from simserve_kernels.sampling_values import canonical_logits

__all__ = ["LogprobsPlan", "plan_logprobs", "store_logprobs"]

_MAX_CHUNKS = 256
_FEW_CHUNKS = 1024
"""So many fit a GPU at a time: up to here chunks are small, so that there are more of them."""


class LogprobsPlan(NamedTuple):
    """How rows are cut into programs. It changes how long a call takes, not what it returns."""

    chunk: int
    """Logits of a program that adds up, and that are read again for each of the likeliest."""
    sum_warps: int = 4
    pick_warps: int = 4


class _Sizes(NamedTuple):
    """What the kernels are compiled for."""

    chunk: int
    chunks: int
    chunks_pad: int  # the next power of two


class _Scratch(NamedTuple):
    """What `add_up` leaves for `pick`, `[R, chunks]` each."""

    tops: torch.Tensor  # float32: the largest logit
    top_ids: torch.Tensor  # int32: its id
    sums: torch.Tensor  # float32: of e^(x − top)
    ranks: torch.Tensor  # int32: how many logits are at least that of the chosen token


def plan_logprobs(num_rows: int, vocab_size: int) -> LogprobsPlan:
    """Return a plan: with few rows, chunks are small, so that these fill a GPU too."""
    few = num_rows * triton.cdiv(vocab_size, 1024) <= _FEW_CHUNKS
    least = triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_CHUNKS))
    return LogprobsPlan(chunk=max(1024 if few else 2048, least))


def store_logprobs(
    out: TokenLogprobs,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
    *,
    plan: LogprobsPlan | None = None,
) -> None:
    """Fill the rows of `out` that ask with log-softmax in float32; the others stay as they are.

    Nothing waits for the host. NaN and what is below −10³⁰ count as −∞. The sums of two calls on
    the same rows are the same to the last bit. Grid: rows × chunks, then rows.

    Args:
        out: `[R, 1 + n]`; a row that asks for fewer keeps what lies behind them.
        logits: `[R, V]`, raw, bfloat16, float16 or float32; rows may be strided.
        tokens: the chosen ones, int64 `[R]`.
        wanted: how many of the likeliest each row asks for, int32 `[R]`, at most n and V; below
            0: for nothing.

    Raises:
        TypeError: dtypes that the kernels do not know.
        ValueError: shapes or devices that do not fit.
    """
    num_rows, vocab_size = check_logits(logits)
    for name, one, dtype in (("tokens", tokens, torch.int64), ("wanted", wanted, torch.int32)):
        check_dtype(name, one, (dtype,))
        check_shape(name, one, (num_rows,))
    out.check(num_rows)
    if (most := out.ids.shape[1] - 1) > vocab_size:
        raise ValueError(f"out has room for {most} of the likeliest of {vocab_size} tokens")
    check_same_device({"logits": logits, "tokens": tokens, "wanted": wanted, **out._asdict()})
    if num_rows:
        with device_guard(logits):
            plan = plan or plan_logprobs(num_rows, vocab_size)
            _launch(out, logits, tokens, wanted, plan)


def _launch(
    out: TokenLogprobs,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
    plan: LogprobsPlan,
) -> None:
    num_rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, plan.chunk)
    sizes = _Sizes(plan.chunk, chunks, triton.next_power_of_2(chunks))
    kinds = (torch.float32, torch.int32, torch.float32, torch.int32)
    scratch = _Scratch(
        *(torch.empty((num_rows, chunks), dtype=kind, device=logits.device) for kind in kinds)
    )
    rows = (scratch, logits, logits.stride(0), vocab_size, tokens, wanted, sizes)
    add_up_kernel[(num_rows * chunks,)](*rows, num_warps=plan.sum_warps)
    strides = (one.stride(0) for one in out)
    pick_kernel[(num_rows,)](out, *strides, *rows, num_warps=plan.pick_warps)


@triton.jit
def add_up_kernel(
    scratch: _Scratch,
    logits: tl.tensor,
    logits_row: tl.tensor,
    vocab: tl.tensor,
    tokens: tl.tensor,
    wanted: tl.tensor,
    opt: tl.constexpr,
) -> None:
    """Store what a chunk of a row comes to."""
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // opt.chunks, (program % opt.chunks).to(tl.int32)
    if tl.load(wanted + row) < 0:
        return
    logits += row * logits_row
    token = chunk * opt.chunk + tl.arange(0, opt.chunk)
    real = token < vocab
    x = canonical_logits(logits + token, real)
    chosen = canonical_logits(logits + tl.load(tokens + row), vocab > 0)
    top = tl.max(x, axis=0)
    weights = tl.exp(x - tl.where(top > float("-inf"), top, 0.0))
    tl.store(scratch.tops + program, top)
    tl.store(
        scratch.top_ids + program, tl.min(tl.where(real & (x == top), token, LARGEST_ID), axis=0)
    )
    tl.store(scratch.sums + program, tl.sum(weights, axis=0))
    tl.store(scratch.ranks + program, tl.sum((real & (x >= chosen)).to(tl.int32), axis=0))


@triton.jit
def pick_kernel(
    out: TokenLogprobs,
    ids_row: tl.tensor,
    logprobs_row: tl.tensor,
    ranks_row: tl.tensor,
    scratch: _Scratch,
    logits: tl.tensor,
    logits_row: tl.tensor,
    vocab: tl.tensor,
    tokens: tl.tensor,
    wanted: tl.tensor,
    opt: tl.constexpr,
) -> None:
    """Store the chosen token's log-probability and rank, then the likeliest tokens of a row."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(wanted + row)
    if count < 0:
        return
    logits += row * logits_row
    ids, logprobs = out.ids + row * ids_row, out.logprobs + row * logprobs_row
    chunk = tl.arange(0, opt.chunks_pad)
    place, real = row * opt.chunks + chunk, chunk < opt.chunks
    top = tl.load(scratch.tops + place, mask=real, other=float("-inf"))
    top_id = tl.load(scratch.top_ids + place, mask=real, other=LARGEST_ID)
    sums = tl.load(scratch.sums + place, mask=real, other=0.0)
    largest = tl.max(top, axis=0)
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    log_sum = tl.log(tl.sum(sums * tl.exp(top - largest), axis=0))
    ranks = tl.load(scratch.ranks + place, mask=real, other=0)
    tl.store(out.ranks + row * ranks_row, tl.sum(ranks, axis=0))
    chosen = tl.load(tokens + row)
    tl.store(ids, chosen.to(tl.int32))
    tl.store(logprobs, canonical_logits(logits + chosen, vocab > 0) - largest - log_sum)
    for i in tl.range(1, count + 1):
        best = tl.max(top, axis=0)
        best_id = tl.min(tl.where(top == best, top_id, LARGEST_ID), axis=0)
        tl.store(ids + i, best_id)
        tl.store(logprobs + i, best - largest - log_sum)
        # What comes behind it in its chunk is the next that the chunk has to offer.
        at = best_id // opt.chunk
        token = at * opt.chunk + tl.arange(0, opt.chunk)
        x = canonical_logits(logits + token, token < vocab)
        behind = (token < vocab) & ((x < best) | ((x == best) & (token > best_id)))
        following = tl.max(tl.where(behind, x, float("-inf")), axis=0)
        following_id = tl.min(tl.where(behind & (x == following), token, LARGEST_ID), axis=0)
        top = tl.where(chunk == at, following, top)
        top_id = tl.where(chunk == at, following_id, top_id)
