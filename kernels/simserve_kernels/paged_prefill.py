"""Varlen attention over a paged cache: chunked prefill, mixed batches, verification of drafts.

Sequence s has `q_len = query_start_loc[s+1] - query_start_loc[s]` queries, the last q_len of its
`seq_lens[s]` tokens, whose keys and values are all in the cache already: token t of s lies in block
`block_table[s, t // block_size]`, place `t % block_size`. Any q_len ≥ 1 in any order: a prompt
(q_len = seq_len), a chunk, a decode (1), k drafts to verify (k + 1); a sequence with q_len 0 is
skipped. Query i stands at position seq_len - q_len + i and sees the keys at 0..position.

The tile, its online softmax and the formula of the scores are those of `attention_tile`.

Grid: (K/V heads, tiles of rows); a program owns one tile of one sequence and one K/V head. The host
does not wait for the device, so it knows the lengths' sum only: there are tokens × group // block_m
+ sequences tiles, an upper bound. Where short and long sequences may meet in one batch, two
launches share the work: tiles of 16 rows for those whose q_len × group rows fit one, and tall tiles
for the others on a second stream beside the first. Each skips the other's.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton

from simserve_kernels.attention_tile import (
    FEW_KEYS,
    Numbers,
    Options,
    Strides,
    Tile,
    attention_kernel,
    choose_tile,
)
from simserve_kernels.checks import (
    attention_options,
    check_cache_scales,
    check_dtype,
    check_float,
    check_heads,
    check_index,
    check_kv_cache,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
    check_slopes,
    device_guard,
)
from simserve_kernels.layouts import CacheLayout, CacheShape, kv_strides, token_run

__all__ = ["FILLING_HEAD_SIZE", "FILLING_TILE", "paged_prefill"]

_SHORT_ROWS = 16
_MAX_ROWS_OF_ONE_TILE = 64
_NO_LIMIT = 2**31 - 1
_FEW_SEQS = 16  # for which one variant of the kernel does
FILLING_TILE = Tile(_SHORT_ROWS, 64, 4, 3)
"""Of sequences that fit one tile, beside others of many keys; for heads of that size at most."""
FILLING_HEAD_SIZE = 128


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int | None = None,
    layout: CacheLayout = "nhd",
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return the attention of all queries, `[num_tokens, num_heads, head_size]` in q's dtype.

    Args:
        q: `[num_tokens, num_heads, head_size]`, bfloat16, float16 or float32. Rows outside
            query_start_loc are neither read nor written.
        k_cache: keys in q's dtype or fp8 e4m3, shaped as `layouts` says.
        v_cache: values, likewise.
        block_table: `[num_seqs, max_num_blocks]`; entries of keys that no query sees are not read.
        seq_lens: `[num_seqs]` tokens of each sequence, its queries among them.
        query_start_loc: `[num_seqs + 1]`, not decreasing; it need not begin at 0.
        max_query_len: the largest q_len (or more): the tiles are chosen by it.
        max_seq_len: the largest of seq_lens (or more), likewise; by default what the table holds.
        layout: of the cache.
        scale: head_size^-0.5 by default; options as in `checks.AttentionOptions`.
        alibi_slopes: `[num_heads]` float32.
        sliding_window: how many keys, its own among them, a query sees.
        soft_cap: the cap of the scores.
        k_scale: what fp8 keys are multiplied with; v_scale: of the values.
        out: where to write, like q; a new tensor by default.
        tile: instead of the tile of the table, for measurements.

    Raises:
        TypeError: a dtype that the kernel does not know.
        ValueError: shapes, devices or options that do not fit.
    """
    out = torch.empty_like(q) if out is None else out
    call = _Call(
        out, q, k_cache, v_cache, block_table, query_start_loc, seq_lens, alibi_slopes, layout
    )
    shape = _check(call, k_scale, v_scale)
    options = attention_options(
        shape.head_size, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    num = Numbers(options.scale * k_scale, v_scale, options.soft_cap, options.sliding_window)
    if seq_lens.shape[0] and q.numel():
        held = block_table.shape[1] * shape.block_size
        longest = held if max_seq_len is None else min(held, max_seq_len)
        _launch(call, shape, num, (max_query_len, longest), tile)
    return out


class _Call(NamedTuple):
    """The tensors of a call."""

    out: torch.Tensor
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    alibi_slopes: torch.Tensor | None
    layout: CacheLayout


def _check(call: _Call, k_scale: float, v_scale: float) -> CacheShape:
    check_float("q", call.q)
    shape = check_kv_cache(call.k_cache, call.v_cache, call.layout, call.q.dtype)
    check_cache_scales(call.k_cache, k_scale, v_scale)
    check_shape("q", call.q, ("num_tokens", "num_heads", shape.head_size))
    check_heads(call.q.shape[1], "the cache", shape.num_kv_heads)
    check_last_dim_contiguous("q", call.q)
    check_dtype("out", call.out, (call.q.dtype,))
    check_shape("out", call.out, tuple(call.q.shape))
    check_last_dim_contiguous("out", call.out)
    check_index("seq_lens", call.seq_lens, ("num_seqs",))
    num_seqs = call.seq_lens.shape[0]
    check_index("block_table", call.block_table, (num_seqs, "max_num_blocks"))
    check_index("query_start_loc", call.query_start_loc, (num_seqs + 1,))
    check_slopes(call.alibi_slopes, call.q.shape[1])
    tensors = call._asdict()
    del tensors["layout"]
    check_same_device(tensors)
    return shape


class _Rows(NamedTuple):
    """Which sequences a launch serves, by their rows, and what its tile is chosen by."""

    fewest: int
    most: int
    height: int
    max_keys: int


def _launch(
    call: _Call, shape: CacheShape, num: Numbers, longest: tuple[int, int], tile: Tile | None
) -> None:
    max_rows, keys = longest[0] * (call.q.shape[1] // shape.num_kv_heads), longest[1]
    one = max_rows <= _MAX_ROWS_OF_ONE_TILE
    with device_guard(call.q):
        if tile is not None or one or call.seq_lens.shape[0] == 1:
            limit = max_rows if one and tile is None else _NO_LIMIT
            _launch_rows(call, shape, num, _Rows(0, limit, max_rows, keys), tile)
        else:
            tall = _Rows(_SHORT_ROWS + 1, _NO_LIMIT, max_rows, keys)
            _launch_mixed(call, shape, num, tall, _Rows(0, _SHORT_ROWS, _SHORT_ROWS, keys))


def _launch_mixed(call: _Call, shape: CacheShape, num: Numbers, tall: _Rows, short: _Rows) -> None:
    """Launch tall and short tiles side by side; captured into a CUDA graph these are two branches.

    The short ones read more than they multiply. They go first, so that they spread over all
    processors, and tall tiles take what they leave. That is sure only in the stream of what was
    before: another one starts a little later, and finds tall tiles where it would go.
    """
    few = tall.max_keys <= FEW_KEYS
    # Few programs at a time must keep the memory busy, so that each takes more at a time.
    plain = few or call.q.dtype == torch.float32 or shape.head_size > FILLING_HEAD_SIZE
    tile = None if plain else FILLING_TILE
    if call.q.device.type != "cuda":
        _launch_rows(call, shape, num, short, tile)
        _launch_rows(call, shape, num, tall, None)
        return
    main, side = torch.cuda.current_stream(), _side_stream(call.q.device)
    side.wait_stream(main)
    _launch_rows(call, shape, num, short, tile)
    with torch.cuda.stream(side):
        _launch_rows(call, shape, num, tall, None)
    main.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _launch_rows(
    call: _Call, shape: CacheShape, num: Numbers, rows: _Rows, tile: Tile | None
) -> None:
    q, num_seqs = call.q, call.seq_lens.shape[0]
    group = q.shape[1] // shape.num_kv_heads
    head_pad = triton.next_power_of_2(shape.head_size)
    tile = tile or choose_tile(q.dtype, call.k_cache.dtype, head_pad, rows.height, rows.max_keys)
    one_tile = rows.most <= tile.block_m
    num_tiles = num_seqs + (0 if one_tile else q.shape[0] * group // tile.block_m)
    opt = Options(
        ieee=q.dtype == torch.float32,
        causal=True,
        window=num.window > 0,
        alibi=call.alibi_slopes is not None,
        soft_cap=num.soft_cap > 0,
        group=group,
        head=shape.head_size,
        head_pad=head_pad,
        kv=kv_strides(call.k_cache, call.v_cache, call.layout),
        vector=token_run(call.v_cache, call.layout),
        block_size=shape.block_size,
        seqs_pad=1 if one_tile else max(_FEW_SEQS, triton.next_power_of_2(num_seqs)),
        one_tile=one_tile,
        block_m=tile.block_m,
        block_n=tile.block_n,
    )
    by = Strides(
        out_token=call.out.stride(0),
        out_head=call.out.stride(1),
        q_token=q.stride(0),
        q_head=q.stride(1),
        table_seq=call.block_table.stride(0),
    )
    attention_kernel[(shape.num_kv_heads, num_tiles)](
        call.out, q, call.k_cache, call.v_cache, call.block_table, call.query_start_loc,
        call.seq_lens, call.seq_lens, call.alibi_slopes, num_seqs, rows.fewest, rows.most,
        num, by, opt, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
