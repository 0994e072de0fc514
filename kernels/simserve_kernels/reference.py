"""The kernels' functions in plain torch and float64: what they are tested against.

Slow and plain on purpose: one sequence at a time, no tiles, no online softmax. It runs on any
device, reads both cache layouts, and only touches the slots and block-table entries that a
sequence owns.
"""

from __future__ import annotations

import torch

from simserve_kernels.layouts import CacheLayout, check_cache

__all__ = ["attention", "gather_kv", "kv_write", "paged_attention"]


def gather_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: CacheLayout,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of the slots, `[num_slots, num_kv_heads, head_size]` float64, dequantised."""
    shape = check_cache(k_cache, v_cache, layout)
    block, place = slots.long() // shape.block_size, slots.long() % shape.block_size
    if layout == "nhd":
        k, v = k_cache[block, place], v_cache[block, place]
    else:
        k = k_cache[block, :, :, place].reshape(len(slots), shape.num_kv_heads, shape.head_size)
        v = v_cache[block, :, :, place]
    return k.double() * k_scale, v.double() * v_scale


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: CacheLayout = "nhd",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k and v `[num_tokens, num_kv_heads, head_size]` into their slots; −1 skips."""
    shape = check_cache(k_cache, v_cache, layout)
    taken = slot_mapping >= 0
    slots = slot_mapping[taken].long()
    block, place = slots // shape.block_size, slots % shape.block_size
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = _quantise(new[taken], cache.dtype, scale)
        if layout == "nhd":
            cache[block, place] = rows
        elif cache.dim() == 5:
            cache[block, :, :, place] = rows.reshape(len(rows), *cache.shape[1:3], cache.shape[4])
        else:
            cache[block, :, :, place] = rows


def _quantise(rows: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if dtype != torch.float8_e4m3fn:
        return rows.to(dtype)
    # By a tensor: CUDA divides by a number as a product with its rounded reciprocal.
    divisor = torch.tensor(scale, dtype=torch.float32, device=rows.device)
    return (rows.float() / divisor).clamp(-448.0, 448.0).to(dtype)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of one sequence's last q_len tokens over all of its kv_len tokens, float64.

    softmax(softcap(scale · q·k) + slope · (key position − query position)) · v, over the keys with
    0 ≤ query position − key position < sliding_window. Query row i has position
    kv_len − q_len + i; query head h reads KV head h // (num_heads / num_kv_heads).

    Args:
        q: `[q_len, num_heads, head_size]`.
        k: `[kv_len, num_kv_heads, head_size]`.
        v: as `k`.
        scale: head_size^-0.5 if None.
        causal: False lets every query see every key (a window then bounds only the past).
        alibi_slopes: `[num_heads]`.
        sliding_window: how many keys, its own among them, a query sees.
        soft_cap: the cap of softcap(s) = soft_cap · tanh(s / soft_cap).

    Returns:
        `[q_len, num_heads, head_size]` float64; rows that see no key are 0.
    """
    q_len, num_heads, head_size = q.shape
    kv_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k)
    scores *= head_size**-0.5 if scale is None else scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
    distance = query - torch.arange(kv_len, device=q.device)[None, :]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * distance
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if sliding_window is not None:
        seen = seen & (distance < sliding_window)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    weights = weights.masked_fill(~seen.any(dim=-1)[:, None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    layout: CacheLayout = "nhd",
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention over the paged cache, of decodes and of prefill chunks alike, float64.

    Args:
        q: `[num_tokens, num_heads, head_size]`, the sequences' new tokens one after the other.
        k_cache: K of the cache, of `layout`.
        v_cache: V of the cache.
        block_table: `[num_seqs, max_blocks]`; only the ceil(seq_len / block_size) first entries of
            a row are read.
        seq_lens: `[num_seqs]` tokens of each sequence, its new ones (already written) among them.
        query_start_loc: `[num_seqs + 1]`, row r of `q` is of sequence i if
            query_start_loc[i] ≤ r < query_start_loc[i + 1]; None is one row a sequence.
        layout: `nhd` or `packed`.
        scale: with the options below as in `attention`.
        alibi_slopes: `[num_heads]`.
        sliding_window: how many keys, its own among them, a query sees.
        soft_cap: the cap of the scores.
        k_scale: what K of the cache is multiplied with.
        v_scale: what V of the cache is multiplied with.

    Returns:
        `[num_tokens, num_heads, head_size]` float64; rows of sequences of length 0 are 0.
    """
    shape = check_cache(k_cache, v_cache, layout)
    starts = range(len(seq_lens) + 1) if query_start_loc is None else query_start_loc.tolist()
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if seq_len == 0 or starts[i] == starts[i + 1]:
            continue
        token = torch.arange(seq_len, device=q.device)
        block = block_table[i].long()[token // shape.block_size]
        slots = block * shape.block_size + token % shape.block_size
        k, v = gather_kv(k_cache, v_cache, layout, slots, k_scale=k_scale, v_scale=v_scale)
        out[rows] = attention(
            q[rows],
            k,
            v,
            scale=scale,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
    return out
