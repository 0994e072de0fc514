"""The checked arguments of one paged decode, as every decode kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simserve_kernels.checks import AttentionOptions
from simserve_kernels.layouts import CacheLayout, CacheShape, kv_strides

__all__ = ["DecodeCall"]


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
