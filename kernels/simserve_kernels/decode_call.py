"""The checked arguments of one paged decode, as every decode kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simserve_kernels.checks import (
    FP8_DTYPE,
    AttentionOptions,
    attention_options,
    check_float,
    check_index,
    check_kv_cache,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
)
from simserve_kernels.layouts import CacheLayout, CacheShape, kv_strides

__all__ = ["DecodeCall", "checked_call"]


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """One decode: tensors whose shapes, dtypes and devices fit, and derived numbers.

    `slopes` are the ALiBi slopes, or any tensor if `alibi` is False.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slopes: torch.Tensor
    alibi: bool
    max_seq_len: int
    layout: CacheLayout
    cache: CacheShape
    options: AttentionOptions

    @property
    def num_seqs(self) -> int:
        """Sequences, each with one query."""
        return int(self.q.shape[0])

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return int(self.q.shape[1])

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.cache.head_size

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.cache.num_kv_heads

    @property
    def score_scale(self) -> float:
        """What the product of q and the stored K is multiplied with."""
        return self.options.scale * self.options.k_scale

    def cache_arguments(self) -> dict[str, int | bool]:
        """Return strides and constants of the cache and the options, by their kernel names."""
        strides = kv_strides(self.k_cache, self.v_cache, self.layout)
        return {
            "k_block": strides.k_block,
            "k_slot": strides.k_slot,
            "k_head": strides.k_head,
            "k_outer": strides.k_outer,
            "v_block": strides.v_block,
            "v_slot": strides.v_slot,
            "v_head": strides.v_head,
            "v_dim": strides.v_dim,
            "X": strides.x,
            "HEAD_SIZE": self.head_size,
            "BLOCK_SIZE": self.cache.block_size,
            "VECTOR": self._token_vector(),
            "WINDOW": self.options.sliding_window,
            "ALIBI": self.alibi,
            "SOFT_CAP": self.options.soft_cap > 0,
        }

    def _token_vector(self) -> int:
        """Return how many tokens of V are contiguous and aligned, at most 8; 1 where not known."""
        if self.layout == "nhd":
            return 1
        strides = kv_strides(self.k_cache, self.v_cache, self.layout)
        apart = (self.cache.block_size, strides.v_block, strides.v_head, strides.v_dim)
        return next(run for run in (8, 4, 2, 1) if all(stride % run == 0 for stride in apart))


def checked_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor,
    *,
    max_seq_len: int,
    layout: CacheLayout,
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
) -> DecodeCall:
    """Return the arguments of `paged_decode` as a call, or refuse them with a sentence.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides, devices or options that do not fit.
    """
    tables = {"block_table": block_table, "seq_lens": seq_lens, "alibi_slopes": alibi_slopes}
    check_same_device({"q": q, "k_cache": k_cache, "v_cache": v_cache, **tables, "out": out})
    check_float("q", q)
    cache = check_kv_cache(k_cache, v_cache, layout, q.dtype)
    if k_cache.dtype != FP8_DTYPE and (k_scale, v_scale) != (1.0, 1.0):
        raise ValueError(f"k_scale and v_scale must be 1 for a cache of {k_cache.dtype}")
    _check_rows(q, out, alibi_slopes, cache)
    check_index("block_table", block_table, (q.shape[0], "max_blocks"))
    check_index("seq_lens", seq_lens, (q.shape[0],))
    if not 0 <= max_seq_len <= block_table.shape[1] * cache.block_size:
        raise ValueError(
            f"max_seq_len is {max_seq_len}: block_table holds {block_table.shape[1]} blocks of "
            f"{cache.block_size} tokens a sequence"
        )
    options = attention_options(
        cache.head_size,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return DecodeCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        slopes=seq_lens if alibi_slopes is None else alibi_slopes,
        alibi=alibi_slopes is not None,
        max_seq_len=max_seq_len,
        layout=layout,
        cache=cache,
        options=options,
    )


def _check_rows(
    q: torch.Tensor, out: torch.Tensor, alibi_slopes: torch.Tensor | None, cache: CacheShape
) -> None:
    check_shape("q", q, ("num_seqs", "num_heads", cache.head_size))
    check_last_dim_contiguous("q", q)
    if q.shape[1] % cache.num_kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads, the cache {cache.num_kv_heads}: "
            "the query heads must be a multiple of the KV heads"
        )
    check_shape("out", out, tuple(q.shape))
    check_last_dim_contiguous("out", out)
    if out.dtype != q.dtype:
        raise TypeError(f"out is {out.dtype}, q {q.dtype}: they must agree")
    if alibi_slopes is not None:
        check_shape("alibi_slopes", alibi_slopes, (q.shape[1],))
        check_last_dim_contiguous("alibi_slopes", alibi_slopes)
