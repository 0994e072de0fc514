"""Attention of one new token per sequence over the paged KV cache: the call and its three paths.

out[i, h] = Σ_t softmax_t(softcap(scale · q[i, h]·K_t) + slope_h · (t − (seq_len_i − 1))) V_t over
the tokens t of sequence i (the last sliding_window of them), whose K and V lie at place
t % block_size of block block_table[i, t // block_size], and are read from KV head
h // (num_heads / num_kv_heads).

* `v1` and `v2`: decode_article, the kernels of vLLM v0.11.0's article paths, and `article`: the
  rule by which that version chooses between them (`use_v1_0_11_0`).
* `auto`: decode_split, our own.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from simserve_kernels.checks import device_guard
from simserve_kernels.decode_article import PARTITION_SIZE, decode_v1, decode_v2
from simserve_kernels.decode_call import checked_call
from simserve_kernels.decode_split import decode_split
from simserve_kernels.decode_workspace import DecodeWorkspace, decode_workspace
from simserve_kernels.layouts import CacheLayout

__all__ = ["DecodePath", "DecodeWorkspace", "decode_workspace", "paged_decode", "use_v1_0_11_0"]

DecodePath = Literal["auto", "v1", "v2", "article"]


def use_v1_0_11_0(max_seq_len: int, num_seqs: int, num_heads: int) -> bool:
    """Return whether vLLM v0.11.0 takes V1 rather than V2, for `num_heads` query heads.

    Up to 8192 tokens, and if either one partition of 512 holds the longest context or there are
    more than 512 pairs of sequence and query head, enough to fill a GPU without partitions.
    """
    num_partitions = -(-max_seq_len // PARTITION_SIZE)
    return max_seq_len <= 8192 and (num_partitions == 1 or num_seqs * num_heads > 512)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seq_len: int,
    layout: CacheLayout = "nhd",
    path: DecodePath = "auto",
    scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Return the attention of each sequence's newest token, whose K and V are already written.

    Nothing waits for the device and no launch depends on the lengths: a captured CUDA graph replays
    for any seq_lens up to max_seq_len, and given `out` and `workspace`, `auto` allocates nothing.

    Args:
        q: `[num_seqs, num_heads, head_size]`, bfloat16, float16 or float32, a view or not.
        k_cache: K of the cache, in the dtype of `q` or float8_e4m3fn; v_cache: V of it.
        block_table: `[num_seqs, max_blocks]` int32 or int64; what nobody owns is never read.
        seq_lens: `[num_seqs]` int32 or int64, the new token counted; 0 gives an output of 0.
        max_seq_len: a bound of seq_lens: V1 and V2 size their scratch, `auto` its tiles by it.
        layout: of the cache; path: see the module.
        scale: head_size^-0.5 if None; alibi_slopes: `[num_heads]` float32.
        sliding_window: how many keys, its own among them, a query sees.
        soft_cap: c of softcap(s) = c · tanh(s / c).
        k_scale: what an fp8 K is multiplied with; v_scale: of V.
        out: as `q`; allocated if None.
        workspace: scratch of `auto`, from `decode_workspace`, for calls one after another.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides, devices or options that do not fit.
    """
    if path not in get_args(DecodePath):
        raise ValueError(f"path is {path!r}: it must be 'auto', 'v1', 'v2' or 'article'")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    call = checked_call(
        q, k_cache, v_cache, block_table, seq_lens, alibi_slopes, out, max_seq_len=max_seq_len,
        layout=layout, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
        k_scale=k_scale, v_scale=v_scale,
    ).in_words()  # fmt: skip
    if q.numel() == 0:
        return out
    if path == "article":
        path = "v1" if use_v1_0_11_0(max_seq_len, call.num_seqs, call.num_heads) else "v2"
    with device_guard(q):
        if path == "auto":
            decode_split(call, out, workspace)
        else:
            {"v1": decode_v1, "v2": decode_v2}[path](call, out)
    return out
