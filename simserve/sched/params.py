"""What a scheduler is told: limits and rules, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SchedulerParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParams:
    """Limits of a step and of a request. Tokens, unless said."""

    max_num_batched_tokens: int
    max_num_seqs: int
    """Most requests on the running list."""
    max_model_len: int
    long_prefill_token_threshold: int = 0
    """Cap on every request's tokens in a step; 0: off."""
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    """Queue order: `fcfs` or `priority`."""
    scheduler_reserve_full_isl: bool = False
    """Admit a request only if all its tokens, not just its next chunk, would find blocks."""
    num_lookahead_tokens: int = 0
    """Slots kept ahead of a running request (eagle-style drafters)."""
    quirks: str = "as_engine"
    """`as_engine`: as vLLM v0.11.0 decides, oddities included; `fixed`: without them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else a policy takes."""

    @property
    def as_engine(self) -> bool:
        """Whether the engine's oddities are kept."""
        return self.quirks == "as_engine"
