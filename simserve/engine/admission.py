"""Turns away requests that can never run, so that they do not block everyone behind them."""

from __future__ import annotations

from simserve.protocols import KVCacheManager
from simserve.types import TraceRequest

__all__ = ["Admission"]


class Admission:
    """Front-end checks.

    Args:
        max_model_len: most tokens of a request.
        kv: the pool that a request must fit into.
        max_num_batched_tokens: most tokens that a request computes in one step.
        num_extra_slots: slots for drafts, and those kept ahead of them, beside a request's tokens.
        as_engine: only what vLLM's front end refuses (empty prompts, prompts beyond max_model_len);
            the rest is let in, is cut at max_model_len, or never fits and blocks the queue.
    """

    def __init__(
        self,
        max_model_len: int,
        kv: KVCacheManager,
        as_engine: bool,
        *,
        max_num_batched_tokens: int | None = None,
        num_extra_slots: int = 0,
    ) -> None:
        self._max_model_len = max_model_len
        self._kv = kv
        self._as_engine = as_engine
        self._max_num_batched_tokens = max_num_batched_tokens or max_model_len
        self._num_extra_slots = num_extra_slots

    def reason_to_reject(self, request: TraceRequest) -> str | None:
        """Why a request can never run, or None."""
        prompt_len = request.prompt_len
        limit = self._max_model_len
        if prompt_len < 1:
            return "the prompt is empty"
        if prompt_len > limit:
            return f"the prompt ({prompt_len} tokens) is longer than max_model_len ({limit})"
        if self._as_engine:
            return None
        if request.output_len < 1:
            return "no output tokens are asked for"
        total = prompt_len + request.output_len
        if total > limit:
            return f"prompt and output ({total} tokens) are longer than max_model_len ({limit})"
        # The last token is never fed back: it needs no slot.
        slots = min(total - 1 + self._num_extra_slots, limit)
        # After a preemption outputs are recomputed like a prompt, as large a chunk as there is.
        if not self._kv.can_hold(slots, min(slots, self._max_num_batched_tokens)):
            usable = self._kv.num_gpu_blocks - 1
            return (
                f"its {slots} slots do not fit into the KV cache "
                f"({usable} usable blocks of {self._kv.block_size} tokens)"
            )
        return None
