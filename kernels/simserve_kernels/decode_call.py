"""The checked arguments of one paged decode, as every decode kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from simserve_kernels.checks import (
    FP8_DTYPE,
    AttentionOptions,
    attention_options,
    check_cache_scales,
    check_float,
    check_heads,
    check_index,
    check_kv_cache,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
    check_slopes,
)
from simserve_kernels.layouts import CacheLayout, CacheShape, kv_strides, token_run

__all__ = ["DecodeCall", "DecodeNumbers", "DecodeOptions", "DecodeStrides", "checked_call"]

WORDS = torch.int16


class DecodeStrides(NamedTuple):
    """Strides in elements; those of K and V as in `layouts.KVStrides`."""

    out_seq: int
    out_head: int
    q_seq: int
    q_head: int
    table_seq: int
    k_block: int
    k_slot: int
    k_head: int
    k_outer: int
    v_block: int
    v_slot: int
    v_head: int
    v_dim: int


class DecodeNumbers(NamedTuple):
    """Numbers of a call; k_scale is part of `scale`."""

    scale: float
    v_scale: float
    soft_cap: float


class DecodeOptions(NamedTuple):
    """What a kernel is compiled for."""

    heads: int
    group: int
    rows: int  # of a tile of queries
    head: int  # elements, or words
    head_pad: int
    fp8: bool
    pairs: bool  # K and V are read as words of two fp8
    ieee: (
        bool  # float32 products, on the CUDA cores; their operands take the registers of two loops
    )
    block_size: int
    x: int
    packed_slot: int  # k_slot of the packed layout, whose 8 no kernel knows the alignment of, or 0
    vector: int  # tokens of V that are contiguous and aligned
    window: int  # 0: no limit
    alibi: bool
    soft_cap: bool
    tile: int  # tokens


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """One decode: tensors whose shapes, dtypes and devices fit, and derived numbers.

    `slopes` are the ALiBi slopes, or any tensor if `alibi` is False. K and V may be seen as words
    of two fp8 (`in_words`), and `cache.head_size` then counts words.
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
        return int(self.q.shape[2])

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.cache.num_kv_heads

    @property
    def score_scale(self) -> float:
        """What the product of q and the stored K is multiplied with."""
        return self.options.scale * self.options.k_scale

    def strides(self, out: torch.Tensor) -> DecodeStrides:
        """Return the strides of the call's tensors and of `out`."""
        by = kv_strides(self.k_cache, self.v_cache, self.layout)
        return DecodeStrides(
            out_seq=out.stride(0),
            out_head=out.stride(1),
            q_seq=self.q.stride(0),
            q_head=self.q.stride(1),
            table_seq=self.block_table.stride(0),
            k_block=by.k_block,
            k_slot=by.k_slot,
            k_head=by.k_head,
            k_outer=by.k_outer,
            v_block=by.v_block,
            v_slot=by.v_slot,
            v_head=by.v_head,
            v_dim=by.v_dim,
        )

    def numbers(self) -> DecodeNumbers:
        """Return the numbers that a kernel does not have to be compiled for."""
        options = self.options
        return DecodeNumbers(self.score_scale, options.v_scale, options.soft_cap)

    def kernel_options(self, tile: int, rows: int) -> DecodeOptions:
        """Return what a kernel with tiles of `rows` queries and `tile` tokens is compiled for."""
        by = kv_strides(self.k_cache, self.v_cache, self.layout)
        pairs = self.k_cache.dtype == WORDS
        return DecodeOptions(
            heads=self.num_heads,
            group=self.group,
            rows=rows,
            head=self.cache.head_size,
            head_pad=triton.next_power_of_2(self.cache.head_size),
            fp8=pairs or self.k_cache.dtype == FP8_DTYPE,
            pairs=pairs,
            ieee=self.k_cache.dtype == torch.float32,
            block_size=self.cache.block_size,
            x=by.x,
            packed_slot=by.k_slot if self.layout == "packed" else 0,
            vector=token_run(self.v_cache, self.layout),
            window=self.options.sliding_window,
            alibi=self.alibi,
            soft_cap=self.options.soft_cap > 0,
            tile=tile,
        )

    def in_words(self) -> DecodeCall:
        """Return the call with K and V as words of two fp8, where the GPU unpacks those.

        Shared memory is transposed into matrix operands by 16-bit units: a word goes straight to
        the thread that multiplies it. Even and odd dimensions are then two products each.
        """
        if self.k_cache.dtype != FP8_DTYPE or self.layout != "nhd" or not self.q.is_cuda:
            return self
        caches = (self.k_cache, self.v_cache)
        apart = [n for x in caches for n in (*x.stride()[:-1], x.storage_offset())]
        if any(n % 2 for n in apart) or torch.cuda.get_device_capability(self.q.device) < (8, 9):
            return self
        return replace(
            self,
            k_cache=self.k_cache.view(WORDS),
            v_cache=self.v_cache.view(WORDS),
            cache=self.cache._replace(head_size=self.head_size // 2),
        )


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
    check_cache_scales(k_cache, k_scale, v_scale)
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
    check_heads(q.shape[1], "the cache", cache.num_kv_heads)
    check_shape("out", out, tuple(q.shape))
    check_last_dim_contiguous("out", out)
    if out.dtype != q.dtype:
        raise TypeError(f"out is {out.dtype}, q {q.dtype}: they must agree")
    check_slopes(alibi_slopes, q.shape[1])
