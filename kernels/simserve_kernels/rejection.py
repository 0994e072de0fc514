"""Verifying drafts so that what comes out is distributed as the model alone would have it.

Of a request with k drafts there are k + 1 rows of logits. A draft d that was drawn from q is kept
with probability min(1, p(d) / q(d)); instead of the first that is not, a token is drawn from what p
has more than q, max(p − q, 0); if all are kept, one more is drawn from p (Leviathan et al., "Fast
inference from transformers via speculative decoding", 2023). p is what `sampling` draws from:
after temperature, top-k, top-p and min-p.

Without q a draft is certain, q(d) = 1. Then drawing from p and keeping the draft if it is what was
drawn is the same, and needs no more than the draw: requests get the very tokens that they would get
without drafts. Greedy rows keep a draft if it is the likeliest token.

`rejection_reference` is the same in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from simserve_kernels.checks import (
    check_dtype,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
    device_guard,
)
from simserve_kernels.sampling import SampledRows, sample
from simserve_kernels.sampling_cut import LARGEST_KEY, is_kept
from simserve_kernels.sampling_settings import SamplingColumns
from simserve_kernels.sampling_values import (
    GREEDY_LIMIT,
    canonical_logits,
    exponent_scale,
    key_of,
    weight_of,
)

__all__ = ["VerifiedDrafts", "count_accepted", "verify_drafts"]

_SCAN = 4096


class VerifiedDrafts(NamedTuple):
    """What became of the drafts of R requests, with L rows of logits together."""

    tokens: torch.Tensor
    """int64 `[L]`: the draft where it is kept, the token instead of it, or the one more. Of a
    request those up to the first that is no draft count."""
    num_accepted: torch.Tensor
    """int64 `[R]`: drafts kept before that one."""


def verify_drafts(
    logits: torch.Tensor,
    columns: SamplingColumns,
    draft_ids: torch.Tensor,
    query_start: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
) -> VerifiedDrafts:
    """Verify drafts, and draw what comes in their place. Nothing waits for the host.

    A row takes 128 random bits from its seed and step: 64 for a token, as `sample`, and 64 to
    keep or reject. Drafts must have been drawn from others.

    Grid of the kernel: rows.

    Args:
        logits: `[L, V]`, after masks and penalties; of each request its rows one after the other.
        columns: settings of the L rows; their steps differ.
        draft_ids: int64 `[L]`: the draft that each row judges; −1 in each request's last row.
        query_start: int64 `[R + 1]`: first row of each request, and L.
        draft_probs: `[L, V]` float32, q of each draft; rows without a draft are not read. None:
            drafts are certain.

    Raises:
        TypeError, ValueError: as `sample`, and arguments that do not fit the logits.
    """
    num_rows = logits.shape[0]
    check_dtype("draft_ids", draft_ids, (torch.int64,))
    check_shape("draft_ids", draft_ids, (num_rows,))
    check_dtype("query_start", query_start, (torch.int64,))
    check_same_device({"logits": logits, "draft_ids": draft_ids, "query_start": query_start})
    drawn = sample(logits, columns)
    if draft_probs is None or columns.path == "greedy":
        kept = drawn.tokens == draft_ids
        return VerifiedDrafts(drawn.tokens, count_accepted(kept, draft_ids, query_start))
    check_dtype("draft_probs", draft_probs, (torch.float32,))
    check_shape("draft_probs", draft_probs, (num_rows, logits.shape[1]))
    check_last_dim_contiguous("draft_probs", draft_probs)
    check_same_device({"logits": logits, "draft_probs": draft_probs})
    kept = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        with device_guard(logits):
            _launch(logits, columns, drawn, draft_ids.contiguous(), draft_probs, kept)
    return VerifiedDrafts(drawn.tokens, count_accepted(kept != 0, draft_ids, query_start))


def count_accepted(
    kept: torch.Tensor, draft_ids: torch.Tensor, query_start: torch.Tensor
) -> torch.Tensor:
    """Return how many drafts of each request are kept before the first that is not, int64 `[R]`.

    Args:
        kept: bool `[L]`.
        draft_ids: int64 `[L]`, −1 where there is none.
        query_start: int64 `[R + 1]`.
    """
    row = torch.arange(len(kept), device=kept.device)
    request = torch.searchsorted(query_start[1:], row, right=True)
    ends = query_start[1:]
    stops = torch.where(kept & (draft_ids >= 0), ends[request], row)
    return ends.clone().scatter_reduce(0, request, stops, "amin") - query_start[:-1]


def _launch(
    logits: torch.Tensor,
    columns: SamplingColumns,
    drawn: SampledRows,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    reject_kernel[(num_rows,)](
        *drawn,
        kept,
        logits,
        logits.stride(0),
        draft_probs,
        draft_probs.stride(0),
        vocab_size,
        draft_ids,
        columns.temperature,
        columns.seeds,
        columns.steps,
        SCAN=min(_SCAN, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )


@triton.jit
def _excess(
    logits: tl.tensor,
    probs: tl.tensor,
    token: tl.tensor,
    vocab: tl.tensor,
    cut: tl.tensor,
    last: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    total: tl.tensor,
) -> tl.tensor:
    """Return max(p − q, 0) of some tokens, float64."""
    x = canonical_logits(logits + token, token < vocab)
    weight = tl.where(is_kept(key_of(x), token, cut, last), weight_of(x, largest, scale), 0)
    q = tl.load(probs + token, mask=token < vocab, other=0.0).to(tl.float64)
    return tl.maximum(weight.to(tl.float64) / total - q, 0.0)


@triton.jit
def _drawn_from_excess(
    random: tl.tensor,
    token: tl.tensor,
    logits: tl.tensor,
    probs: tl.tensor,
    vocab: tl.tensor,
    cut: tl.tensor,
    last: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    total: tl.tensor,
    SCAN: tl.constexpr,
) -> tl.tensor:
    """Return the first token whose running sum of max(p − q, 0) exceeds `random` of the whole.

    Where there is nothing, p and q are the same but for rounding: `token`, drawn from p.
    """
    whole = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, SCAN):
        ids = start + tl.arange(0, SCAN)
        rest = _excess(logits, probs, ids, vocab, cut, last, largest, scale, total)
        whole += tl.sum(rest, axis=0)
    goal, before = random * whole, tl.full([], 0.0, tl.float64)
    chosen, heaviest = tl.full([], LARGEST_KEY, tl.int32), tl.full([], -1, tl.int32)
    for start in range(0, vocab, SCAN):
        ids = start + tl.arange(0, SCAN)
        rest = _excess(logits, probs, ids, vocab, cut, last, largest, scale, total)
        reached = (before + tl.cumsum(rest, 0) > goal) & (rest > 0.0)
        chosen = tl.minimum(chosen, tl.min(tl.where(reached, ids, LARGEST_KEY), axis=0))
        heaviest = tl.maximum(heaviest, tl.max(tl.where(rest > 0.0, ids, -1), axis=0))
        before += tl.sum(rest, axis=0)
    chosen = tl.where(chosen == LARGEST_KEY, heaviest, chosen).to(tl.int64)
    return tl.where(chosen >= 0, chosen, token)


@triton.jit
def reject_kernel(
    tokens: tl.tensor,
    cuts: tl.tensor,
    last_ties: tl.tensor,
    kept: tl.tensor,
    logits: tl.tensor,
    logits_row: tl.tensor,
    probs: tl.tensor,
    probs_row: tl.tensor,
    vocab: tl.tensor,
    draft_ids: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    steps: tl.tensor,
    SCAN: tl.constexpr,
) -> None:
    """Keep or replace the draft of a row, whose token `tokens` has as it was drawn from p."""
    row = tl.program_id(0).to(tl.int64)
    draft, token = tl.load(draft_ids + row), tl.load(tokens + row)
    temperature = tl.load(temperatures + row)
    if draft < 0:
        return
    if temperature < GREEDY_LIMIT:
        tl.store(kept + row, (token == draft).to(tl.int32))
        return
    logits += row * logits_row
    probs += row * probs_row
    cut, last = key_of(tl.load(cuts + row)), tl.load(last_ties + row)
    scale = exponent_scale(temperature)
    largest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocab, SCAN):
        ids = start + tl.arange(0, SCAN)
        largest = tl.maximum(largest, tl.max(canonical_logits(logits + ids, ids < vocab), axis=0))
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    whole = tl.full([], 0, tl.int64)
    for start in range(0, vocab, SCAN):
        ids = start + tl.arange(0, SCAN)
        x = canonical_logits(logits + ids, ids < vocab)
        weight = tl.where(is_kept(key_of(x), ids, cut, last), weight_of(x, largest, scale), 0)
        whole += tl.sum(weight, axis=0)
    total = tl.maximum(whole, 1).to(tl.float64)
    x = canonical_logits(logits + draft, draft < vocab)
    stays = is_kept(key_of(x), draft.to(tl.int32), cut, last)
    p = tl.where(stays, weight_of(x, largest, scale), 0).to(tl.float64) / total
    q = tl.load(probs + draft).to(tl.float64)
    a, b, c, d = tl.randint4x(tl.load(seeds + row), tl.load(steps + row))
    keeps = ((c.to(tl.uint64) << 32) | d.to(tl.uint64)).to(tl.float64) * 2.0**-64
    if keeps * q < p:
        tl.store(kept + row, 1)
        tl.store(tokens + row, draft)
    else:
        random = ((a.to(tl.uint64) << 32) | b.to(tl.uint64)).to(tl.float64) * 2.0**-64
        token = _drawn_from_excess(
            random, token, logits, probs, vocab, cut, last, largest, scale, total, SCAN
        )
        tl.store(tokens + row, token)
