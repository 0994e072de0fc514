"""What is worth saying about a scheduler configuration that is valid but may not be meant."""

from __future__ import annotations

from simserve.config.kv_cache import KVCache
from simserve.config.scheduler import Scheduler
from simserve.types import ModelShape

__all__ = ["remarks", "unreachable"]

_BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
"""What vLLM v0.11.0 takes for --block-size."""


def unreachable(scheduler: Scheduler, kv_cache: KVCache, model: ModelShape) -> list[str]:
    """Why an engine of this version cannot be started so on a common GPU. Empty: it can."""
    if scheduler.kind != "vllm":
        return [f"scheduler.kind: '{scheduler.kind}' is not the engine's scheduler"]
    reasons = []
    if not scheduler.enable_chunked_prefill:
        reasons.append(
            "scheduler.enable_chunked_prefill: vLLM v0.11.0 forces chunked prefill on for models "
            "that generate text; no such engine runs with it off"
        )
    if scheduler.max_num_partial_prefills != 1 or scheduler.max_long_partial_prefills != 1:
        reasons.append(
            "scheduler.max_num_partial_prefills, max_long_partial_prefills: the arguments of vLLM "
            "v0.11.0 refuse any value but 1; its scheduler does not enforce them: all that comes "
            "of them is the default of long_prefill_token_threshold"
        )
    if kv_cache.block_size not in _BLOCK_SIZES:
        sizes = ", ".join(map(str, _BLOCK_SIZES))
        reasons.append(
            f"kv_cache.block_size: vLLM v0.11.0 refuses {kv_cache.block_size}; it takes {sizes}"
        )
    max_model_len, positions = scheduler.max_model_len, model.max_position_embeddings
    if max_model_len is not None and max_model_len > positions:
        reasons.append(
            f"scheduler.max_model_len: {max_model_len} is more than the {positions} positions of "
            f"{model.name}; vLLM v0.11.0 refuses that"
        )
    return reasons


def remarks(scheduler: Scheduler, kv_cache: KVCache, model: ModelShape) -> list[str]:
    """Warnings about resolved values that have no effect, or one that surprises."""
    found = unreachable(scheduler, kv_cache, model) if scheduler.kind == "vllm" else []
    threshold, budget = scheduler.long_prefill_token_threshold, scheduler.max_num_batched_tokens
    if budget is not None and threshold >= budget:
        found.append(
            f"scheduler.long_prefill_token_threshold: {threshold} does nothing, "
            f"because a step has at most max_num_batched_tokens = {budget} tokens"
        )
    if threshold and not scheduler.enable_chunked_prefill and scheduler.quirks == "as_engine":
        found.append(
            f"scheduler.long_prefill_token_threshold: {threshold} cuts prompts although chunked "
            "prefill is off, as in the engine (scheduler.quirks: fixed does not)"
        )
    return found
