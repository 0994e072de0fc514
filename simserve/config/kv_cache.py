"""Configuration of the KV cache."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from simserve.config.base import Count, Registered, StrictModel

__all__ = ["FullAttention", "KVCache", "KVGroup", "SlidingWindow"]


class FullAttention(StrictModel):
    """Layers that attend to everything."""

    type: Literal["full"]


class SlidingWindow(StrictModel):
    """Layers that attend to the last `window` tokens."""

    type: Literal["sliding_window"]
    window: Count
    """Tokens."""


KVGroup = Annotated[FullAttention | SlidingWindow, Field(discriminator="type")]


def _auto_or_number(value: Any) -> str:
    return "auto" if isinstance(value, str) else "number"


NumGpuBlocks = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[int, Field(ge=2, le=10**9), Tag("number")],
    Discriminator(_auto_or_number),
]


class KVCache(StrictModel):
    """The block pool and the prefix cache."""

    block_size: Annotated[int, Field(ge=1, le=65536)] = 16
    """Tokens per block."""
    num_gpu_blocks: NumGpuBlocks = "auto"
    """Size of the pool, the null block included; auto: what is left on the GPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that the engine may use (for num_gpu_blocks: auto)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of the KV entries; auto: the model's."""
    enable_prefix_caching: bool = True
    """Whether blocks of equal prefixes are shared."""
    prefix_cache_at_start: Literal["empty", "warm"] = "empty"
    """warm: it holds what serving the same requests once before, unmeasured, has left in it."""
    groups: Annotated[tuple[KVGroup, ...], Field(strict=False, min_length=1)] | None = None
    """KV cache groups of the model's layers. null: one, as the model has it."""
    allocator: Annotated[str, Registered("allocators")] = "paged"
    """How memory is divided: paged, contiguous (a max_model_len region a request), or your own."""
    eviction: Annotated[str, Registered("evictions")] = "lru"
    """Which free cached block is reused first: lru, fifo, or your own."""

    @model_validator(mode="after")
    def _warm_needs_a_cache(self) -> Self:
        if self.prefix_cache_at_start == "warm" and not self.enable_prefix_caching:
            raise ValueError(
                "prefix_cache_at_start is warm, enable_prefix_caching is false: there is no cache"
            )
        return self
