"""When attention over a shared prefix is done once for the whole batch (cascade attention)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["common_prefix_len", "use_cascade_attention"]

MIN_PREFIX_LEN = 256
MIN_REQUESTS = 8
TILE = 128
"""Query rows, and keys, of one tile of the attention kernel."""


def common_prefix_len(
    num_common_prefix_blocks: int, block_size: int, num_computed_tokens: Sequence[int]
) -> int:
    """Tokens of the prefix that cascade attention may share: whole blocks that every request has
    computed. `num_computed_tokens` are those before the step, of the requests in the batch.

    >>> common_prefix_len(20, 16, [400, 300])
    288
    """
    shared = min(num_common_prefix_blocks * block_size, min(num_computed_tokens))
    return shared // block_size * block_size


def use_cascade_attention(
    prefix_len: int,
    query_lens: Sequence[int],
    num_query_heads: int,
    num_kv_heads: int,
    *,
    use_alibi: bool = False,
    use_sliding_window: bool = False,
    use_local_attention: bool = False,
    num_sms: int,
) -> bool:
    """FlashAttention's rule in vLLM v0.11.0.

    A prefix of at least 256 tokens and 8 requests are needed, and plain causal attention. If the
    alternative is split-KV decoding (all queries of one token, grouped heads), the two are compared
    by waves of thread blocks over the GPU's `num_sms` multiprocessors.
    """
    if prefix_len < MIN_PREFIX_LEN or len(query_lens) < MIN_REQUESTS:
        return False
    if use_alibi or use_sliding_window or use_local_attention:
        return False
    queries_per_kv = num_query_heads // num_kv_heads
    if queries_per_kv == 1 or any(n != 1 for n in query_lens):
        return True
    num_reqs = len(query_lens)
    prefix_tiles = _ceil_div(prefix_len, TILE)
    cascade_waves = _ceil_div(num_query_heads * _ceil_div(num_reqs, TILE), num_sms)
    split_blocks = num_reqs * num_kv_heads * _ceil_div(queries_per_kv, TILE) * prefix_tiles
    return cascade_waves * prefix_tiles < _ceil_div(split_blocks, num_sms)


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)
