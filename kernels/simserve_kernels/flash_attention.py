"""Attention over contiguous keys that writes no scores to memory: the paged kernel's plain sibling.

Sequence s has the queries `query_start_loc[s]..query_start_loc[s+1]` and the keys
`key_start_loc[s]..key_start_loc[s+1]`; causally, its last query sees its last key. The tile and its
online softmax are those of `attention_tile` (after Dao et al., "FlashAttention", 2022, and
"FlashAttention-2", 2023): per row (m, l, A) in float32, O = A / l.

Grid: (K/V heads, tiles of rows); a program owns one tile of one sequence and one K/V head. There
are tokens × group // block_m + sequences tiles, an upper bound; spare programs return at once.
"""

from __future__ import annotations

import torch
import triton

from simserve_kernels.attention_tile import (
    Numbers,
    Options,
    Strides,
    Tile,
    attention_kernel,
    choose_tile,
)
from simserve_kernels.checks import (
    attention_options,
    check_dtype,
    check_float,
    check_heads,
    check_index,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
    check_slopes,
    device_guard,
)
from simserve_kernels.layouts import KVStrides

__all__ = ["check_dense", "flash_attention"]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return attention `[num_tokens, num_heads, head_size]` in q's dtype.

    Args:
        q: `[num_tokens, num_heads, head_size]`, bfloat16, float16 or float32; views may be strided.
        k: `[num_keys, num_kv_heads, head_size]` in q's dtype.
        v: as k.
        query_start_loc: `[num_seqs + 1]`, integer, from 0 to num_tokens.
        key_start_loc: `[num_seqs + 1]`, integer, from 0 to num_keys.
        causal: False lets every query see every key; a window then bounds only the past.
        scale: head_size^-0.5 by default.
        alibi_slopes: `[num_heads]` float32; slope × (key - query position) after scaling.
        sliding_window: how many keys, its own among them, a query sees.
        soft_cap: c of c·tanh(score / c).
        tile: instead of the tile of the table, for measurements.

    Raises:
        TypeError: a dtype that the kernel does not know.
        ValueError: shapes, devices or options that do not fit.
    """
    check_dense(q, k, v)
    options = attention_options(
        q.shape[-1], scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
    )
    check_index("query_start_loc", query_start_loc, ("num_seqs + 1",))
    check_index("key_start_loc", key_start_loc, tuple(query_start_loc.shape))
    check_slopes(alibi_slopes, q.shape[1])
    if q.shape[0] and query_start_loc.shape[0] < 2:
        raise ValueError(f"query_start_loc has no sequences: q has {q.shape[0]} tokens")
    tensors = {"q": q, "k": k, "v": v, "query_start_loc": query_start_loc}
    check_same_device({**tensors, "key_start_loc": key_start_loc, "alibi_slopes": alibi_slopes})
    num = Numbers(options.scale, 1.0, options.soft_cap, options.sliding_window)
    out = torch.empty_like(q)
    if q.numel():
        _launch(out, q, k, v, (query_start_loc, key_start_loc, alibi_slopes), num, causal, tile)
    return out


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse q, k and v `[tokens, heads, head_size]` that do not fit each other.

    Raises:
        TypeError: not one dtype, or none that the kernels know.
        ValueError: shapes or strides that do not fit.
    """
    check_float("q", q)
    check_shape("q", q, ("num_tokens", "num_heads", "head_size"))
    for name, tensor in (("k", k), ("v", v)):
        check_dtype(name, tensor, (q.dtype,))
        check_shape(name, tensor, ("num_keys", "num_kv_heads", q.shape[2]))
    check_shape("v", v, tuple(k.shape))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_last_dim_contiguous(name, tensor)
    if 0 in k.shape[1:]:
        raise ValueError(f"k has shape {tuple(k.shape)}: there must be a head of one element")
    check_heads(q.shape[1], "k", k.shape[1])


def _launch(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    num: Numbers,
    causal: bool,
    tile: Tile | None,
) -> None:
    query_start_loc, key_start_loc, alibi_slopes = sequences
    num_seqs, group = query_start_loc.shape[0] - 1, q.shape[1] // k.shape[1]
    head_pad = triton.next_power_of_2(q.shape[2])
    # The longest of the sequences has at least the mean of their rows.
    mean_rows = -(-q.shape[0] * group // num_seqs)
    tile = tile or choose_tile(q.dtype, k.dtype, head_pad, mean_rows, -(-k.shape[0] // num_seqs))
    opt = Options(
        ieee=q.dtype == torch.float32,
        causal=causal,
        window=num.window > 0,
        alibi=alibi_slopes is not None,
        soft_cap=num.soft_cap > 0,
        group=group,
        head=q.shape[2],
        head_pad=head_pad,
        kv=KVStrides(
            k_block=0,
            k_slot=k.stride(0),
            k_head=k.stride(1),
            k_outer=1,
            x=1,
            v_block=0,
            v_slot=v.stride(0),
            v_head=v.stride(1),
            v_dim=1,
        ),
        vector=1,
        block_size=0,
        seqs_pad=triton.next_power_of_2(num_seqs),
        one_tile=False,
        block_m=tile.block_m,
        block_n=tile.block_n,
    )
    by = Strides(
        out_token=out.stride(0),
        out_head=out.stride(1),
        q_token=q.stride(0),
        q_head=q.stride(1),
        table_seq=0,
    )
    num_rows = q.shape[0] * group
    num_tiles = num_seqs + num_rows // tile.block_m
    with device_guard(q):
        attention_kernel[(k.shape[1], num_tiles)](
            out, q, k, v, None, query_start_loc, None, key_start_loc, alibi_slopes,
            num_seqs, 0, num_rows, num, by, opt, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
