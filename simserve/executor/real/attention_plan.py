"""How the kernels deal a batch out to a GPU, in the numbers that a cost model takes."""

from __future__ import annotations

from typing import Any

import torch

from simserve.executor.real.attention import AttentionPath
from simserve.types import ModelShape
from simserve_kernels.attention_tile import FEW_KEYS, Tile, choose_tile
from simserve_kernels.decode_split import FINE_TOKENS, MANY_SEQS, split_tile
from simserve_kernels.decode_workspace import num_sms, split_grid
from simserve_kernels.paged_prefill import FILLING_HEAD_SIZE, FILLING_TILE

__all__ = ["attention_plan"]

_WARPS_OF_TILES = 8
"""That a multiprocessor holds of large tiles: their queries, keys and values fill it."""
_WHOLE_PER_SM = 4
"""Programs with few queries that it holds."""
_MANY_ROWS = 1024
"""Of queries times heads: so many that they do not fit one tile."""

Launch = dict[str, int]


def attention_plan(
    model: ModelShape,
    path: AttentionPath,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
) -> dict[str, Any] | None:
    """The launches of a step's attention on a GPU (`cost.dealing.AttentionPlan`); None: not known.

    They are known where chunks and tiles follow from lengths alone: with the decode kernel `auto`,
    one call for a batch with prefills, and caches of the dtype of the queries.
    """
    if path.attention != "auto" or path.mixed != "varlen" or path.num_draft_tokens:
        return None
    if kv_dtype != dtype or dtype == torch.float32:
        return None
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads

    def decodes(num_seqs: int) -> Launch:
        tile = split_tile(kv_dtype, model.head_dim, path.kv_layout, num_seqs, max_model_len)
        grid = split_grid(device, num_seqs, heads, kv_heads, tile.programs_per_sm)
        # Where a KV head's queries are more than one program takes, those count as one.
        programs = grid.budget * kv_heads
        return {"tile": tile.tokens, "programs": programs, "fine_tokens": FINE_TOKENS}

    def tiles(tile: Tile, per_sm: int) -> Launch:
        programs = per_sm * num_sms(device)
        return {"rows": tile.block_m, "keys": tile.block_n, "programs": programs}

    def large(max_keys: int) -> Launch:
        tile = choose_tile(dtype, kv_dtype, model.head_dim, _MANY_ROWS, max_keys)
        return tiles(tile, max(1, _WARPS_OF_TILES // tile.num_warps))

    one_tile = choose_tile(dtype, kv_dtype, model.head_dim, FILLING_TILE.block_m, FEW_KEYS)
    long_whole = FILLING_TILE if model.head_dim <= FILLING_HEAD_SIZE else one_tile
    return {
        "few_decodes": decodes(MANY_SEQS - 1),
        "many_decodes": decodes(MANY_SEQS),
        "many_decodes_from": MANY_SEQS,
        "short": {"tall": large(FEW_KEYS), "whole": tiles(one_tile, _WHOLE_PER_SM)},
        "long": {"tall": large(FEW_KEYS + 1), "whole": tiles(long_whole, _WHOLE_PER_SM)},
        "long_from": FEW_KEYS + 1,
    }
