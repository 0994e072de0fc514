"""Attention of a batch over the paged KV cache: what the decoder calls once a layer."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from simserve.executor.real.kernels import Kernels
from simserve.executor.real.marks import LayerMarks
from simserve.executor.real.ops import Ops
from simserve_kernels.layouts import CacheLayout

__all__ = ["AttentionPath", "BatchOnDevice", "PagedAttention", "WithoutRope"]

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]


class AttentionPath(NamedTuple):
    """Which kernels attend, and what they ask of a batch."""

    attention: Literal["auto", "v1", "v2", "article"]
    """The decode kernel; `article` is the rule of the first paged attention kernels."""
    kv_layout: CacheLayout
    mixed: Literal["varlen", "split"]
    """A batch with prefills: one call for all of it, or decodes (moved to the front) by the decode
    kernel and the rest in a second call."""
    num_draft_tokens: int = 0

    @property
    def decode_threshold(self) -> int:
        """Most new tokens of a request that counts as a decode: its own, and drafts to verify."""
        return 1 + self.num_draft_tokens

    @property
    def require_uniform(self) -> bool:
        """Whether decodes of one call all have the same number of new tokens."""
        return self.num_draft_tokens > 0

    @property
    def reorders(self) -> bool:
        """Whether decodes must stand at the front of a batch."""
        return self.mixed == "split"

    @property
    def sizes_by_length(self) -> bool:
        """Whether the decode kernel's scratch, and its choice, depend on the longest context."""
        return self.attention != "auto"

    def length_bound(self, max_seq_len: int) -> int:
        """What the decode kernel is told of the longest context, if it depends on it.

        A power of two, from 512: graphs and variants are made for some lengths, not for each.
        """
        return 1 << (max(max_seq_len, 512) - 1).bit_length()


class BatchOnDevice(NamedTuple):
    """What attention needs to know of a batch of R requests with T new tokens."""

    positions: torch.Tensor
    """Position of each new token in its request, `[T]`."""
    slot_mapping: torch.Tensor
    """Cache slot of each new token, negative for padding; int64 `[T]`."""
    block_table: torch.Tensor
    """`[R, blocks]` int32."""
    seq_lens: torch.Tensor
    """Tokens after the step, 0 for padding; int32 `[R]`."""
    query_start_loc: torch.Tensor
    """int32 `[R + 1]`."""
    num_decodes: int
    """Leading requests that the decode kernel serves: they have one new token each."""
    max_query_len: int
    max_seq_len: int


class PagedAttention:
    """Keeps new keys and values and attends to all that came before (protocol `Attend`).

    Args:
        caches: K and V of each layer.
        path: which kernels.
        kernels: where they come from.
        sliding_window: how many keys a token sees, its own among them; None: all.
        table: of the rotary embedding, if queries and keys come unrotated (`WithoutRope`).
    """

    def __init__(
        self,
        caches: KVCaches,
        path: AttentionPath,
        kernels: Kernels,
        sliding_window: int | None,
        table: torch.Tensor | None = None,
    ) -> None:
        self.caches = caches
        self.path = path
        self._kernels = kernels
        self._table = table
        self._options = {"layout": path.kv_layout, "sliding_window": sliding_window}
        self.batch: BatchOnDevice | None = None
        """The batch that is being computed."""
        self.marks: LayerMarks | None = None
        """Takes the time before and after each part, if the forward pass is to be broken down."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `model.Attend`."""
        batch, marks = self.batch, self.marks
        assert batch is not None
        k_cache, v_cache = self.caches[layer]
        if marks is not None:
            marks.take()
        self._write(q, k, v, k_cache, v_cache, batch)
        if marks is not None:
            marks.take()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._attend(q, k_cache, v_cache, batch, out)
        if marks is not None:
            marks.take()
        return out

    def _write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: BatchOnDevice,
    ) -> None:
        """Bring keys and values to their slots, and rotate what is not rotated yet."""
        kernels, layout = self._kernels, self.path.kv_layout
        to = (k_cache, v_cache, batch.slot_mapping)
        if self._table is None:
            kernels.kv_write(k, v, *to, layout=layout)
        else:
            assert kernels.rope_kv_write is not None
            kernels.rope_kv_write(q, k, v, batch.positions, self._table, *to, layout=layout)

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: BatchOnDevice,
        out: torch.Tensor,
    ) -> None:
        n, table, seq_lens = batch.num_decodes, batch.block_table, batch.seq_lens
        if n:
            self._kernels.paged_decode(
                q[:n], k_cache, v_cache, table[:n], seq_lens[:n], max_seq_len=batch.max_seq_len,
                path=self.path.attention, out=out[:n], **self._options,
            )  # fmt: skip
        if n < len(seq_lens):
            self._kernels.paged_prefill(
                q, k_cache, v_cache, table[n:], seq_lens[n:], batch.query_start_loc[n:],
                max_query_len=batch.max_query_len, max_seq_len=batch.max_seq_len, out=out,
                **self._options,
            )  # fmt: skip


class WithoutRope:
    """The ops of a decoder whose attention rotates queries and keys itself."""

    def __init__(self, ops: Ops) -> None:
        self.rms_norm = ops.rms_norm
        self.add_rms_norm = ops.add_rms_norm
        self.silu_mul = ops.silu_mul

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave them as they are."""
        return q, k
