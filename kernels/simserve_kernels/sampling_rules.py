"""Masks, biases and penalties on a batch of logits, from state that lies on the device.

vLLM's order: biases and masks (allowed tokens, bad words, minimum length), then penalties. Every
row of logits belongs to a request whose state has a row of its own, kept from step to step. Rows
without rules are read by nobody. `sampling_reference.apply_rules` is the same in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from simserve_kernels.checks import (
    check_dtype,
    check_last_dim_contiguous,
    check_logits,
    check_same_device,
    check_shape,
    device_guard,
)
from simserve_kernels.sampling_settings import PROMPT_BIT, RuleColumns

__all__ = ["apply_rules"]

_CHUNK = 2048
_IN_PROMPT = tl.constexpr(PROMPT_BIT)
_TIMES = tl.constexpr(PROMPT_BIT - 1)


class _Sizes(NamedTuple):
    """What the kernels are compiled for."""

    vocab: int
    words: int  # of 32 tokens each, of a row of `allowed`
    chunk: int
    chunks: int
    entries: int
    entries_pad: int  # the next power of two
    before: int  # tokens that may have to stand before that of an entry


def apply_rules(
    logits: torch.Tensor,
    columns: RuleColumns,
    rows: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Change logits `[L, V]` in place as the rules of their requests have it.

    Grid: a program a row for what concerns single tokens (biases, masks); then rows × chunks for
    what is looked up for every token (allowed ones, penalties).

    Args:
        logits: bfloat16, float16 or float32; rows may be strided.
        columns: the rules of N requests.
        rows: which of them each row of logits belongs to, int64 `[L]`.
        positions: of the token that it predicts, int64 `[L]`.
        ids: the tokens of the N requests, int32 `[N, longest]`.

    Raises:
        TypeError: dtypes that the kernels do not know.
        ValueError: shapes or devices that do not fit.
    """
    num_logits, vocab_size = check_logits(logits)
    for name, one in (("rows", rows), ("positions", positions)):
        check_dtype(name, one, (torch.int64,))
        check_shape(name, one, (num_logits,))
    check_dtype("ids", ids, (torch.int32,))
    check_last_dim_contiguous("ids", ids)
    columns.check(vocab_size)
    check_same_device({"logits": logits, "rows": rows, "ids": ids, **columns.tensors})
    if num_logits:
        with device_guard(logits):
            _launch(logits, columns, (rows, positions), ids)


def _launch(
    logits: torch.Tensor,
    columns: RuleColumns,
    places: tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor,
) -> None:
    num_logits, vocab_size = logits.shape
    tokens, before = columns.entry_tokens, columns.entry_before
    num_entries = tokens.shape[1] if tokens is not None else 0
    chunks = triton.cdiv(vocab_size, _CHUNK)
    sizes = _Sizes(
        vocab=vocab_size,
        words=triton.cdiv(vocab_size, 32),
        chunk=_CHUNK,
        chunks=chunks,
        entries=num_entries,
        entries_pad=triton.next_power_of_2(max(1, num_entries)),
        before=before.shape[2] if before is not None else 0,
    )
    row = (logits, logits.stride(0), *places)
    if num_entries:
        _entries_kernel[(num_logits,)](*row, ids, ids.stride(0), columns, sizes, num_warps=4)
    if columns.allowed is not None or columns.counts is not None:
        _tokens_kernel[(num_logits * chunks,)](*row, columns, sizes, num_warps=4)


@triton.jit
def _entries_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    ids: tl.tensor,
    ids_stride: tl.tensor,
    columns: RuleColumns,
    opt: tl.constexpr,
) -> None:
    """Add to, or mask, the tokens of a row's entries that hold at its position."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    if tl.load(columns.has_entries + row) == 0:
        return
    position = tl.load(positions + i)
    entry = tl.arange(0, opt.entries_pad)
    real = entry < opt.entries
    place = row * opt.entries + entry
    token = tl.load(columns.entry_tokens + place, mask=real, other=-1)
    value = tl.load(columns.entry_values + place, mask=real, other=0.0)
    since = tl.load(columns.entry_since + place, mask=real, other=0)
    until = tl.load(columns.entry_until + place, mask=real, other=0)
    holds = (token >= 0) & (position >= since) & (position < until)
    if columns.entry_before is not None:
        for back in range(opt.before):
            wanted = tl.load(columns.entry_before + place * opt.before + back, mask=real, other=-1)
            had = tl.load(ids + row * ids_stride + tl.maximum(position - 1 - back, 0))
            holds = holds & ((wanted < 0) | (wanted == had))
    is_mask = value == float("-inf")
    logit = logits + i * stride + token
    x = tl.load(logit, mask=holds & (is_mask == 0), other=0.0).to(tl.float32)
    tl.store(logit, x + value, mask=holds & (is_mask == 0))
    tl.debug_barrier()  # a token may have a bias and a mask
    tl.store(logit, float("-inf"), mask=holds & is_mask)


@triton.jit
def _tokens_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    columns: RuleColumns,
    opt: tl.constexpr,
) -> None:
    """Mask what is not allowed, and penalise what was there before, in a chunk of a row."""
    i = (tl.program_id(0) // opt.chunks).to(tl.int64)
    row = tl.load(rows + i)
    if tl.load(columns.has_tokens + row) == 0:
        return
    token = (tl.program_id(0) % opt.chunks) * opt.chunk + tl.arange(0, opt.chunk)
    real = token < opt.vocab
    logit = logits + i * stride + token
    x = tl.load(logit, mask=real, other=0.0).to(tl.float32)
    if columns.allowed is not None:
        word = tl.load(columns.allowed + row * opt.words + (token >> 5), mask=real, other=0)
        x = tl.where(((word >> (token & 31)) & 1) == 1, x, float("-inf"))
    if columns.counts is not None:
        seen = tl.load(columns.counts + row * opt.vocab + token, mask=real, other=0)
        repetition = tl.load(columns.repetition + row)
        x = tl.where(seen == 0, x, tl.where(x > 0, x / repetition, x * repetition))
        times = (seen & _TIMES).to(tl.float32)
        x -= tl.load(columns.frequency + row) * times
        x -= tl.where(times > 0, tl.load(columns.presence + row), 0.0)
    tl.store(logit, x, mask=real)
