"""Where the keys and values of a tile lie, paged or contiguous, and their loads.

`opt` is `attention_tile.Options`. Strides are constants there: with others a step of 128 keys had a
sixth more instructions, all of them for addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_numbers", "load_tiles"]


@triton.jit
def block_numbers(
    table_row: tl.tensor, begin: tl.tensor, wanted: tl.tensor, opt: tl.constexpr
) -> tl.tensor:
    """Return the block numbers of a tile's `wanted` keys, 0 for others; of no use if contiguous.

    A tile begins at a multiple of block_n. Where that is the start of a block, what follows from a
    key's place in the tile does not change from tile to tile.
    """
    place = tl.arange(0, opt.block_n)
    if opt.block_size == 0:
        return place
    else:
        if opt.block_n % opt.block_size == 0:
            entries = begin // opt.block_size + place // opt.block_size
        else:
            entries = (begin + place) // opt.block_size
        return tl.load(table_row + entries, mask=wanted, other=0).to(tl.int32)


@triton.jit
def _rows(
    blocks: tl.tensor,
    begin: tl.tensor,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return where the keys (or values) of a tile begin, for a stride of blocks and of slots.

    In 64 bits: block numbers times strides leave 32.
    """
    place = tl.arange(0, opt.block_n)
    if opt.block_size == 0:
        return (begin + place).to(tl.int64) * SLOT
    else:
        if opt.block_n % opt.block_size == 0:
            slots = place % opt.block_size
        else:
            slots = (begin + place) % opt.block_size
        return blocks.to(tl.int64) * BLOCK + slots.to(tl.int64) * SLOT


@triton.jit
def load_tiles(
    k_head: tl.tensor,
    v_head: tl.tensor,
    blocks: tl.tensor,
    begin: tl.tensor,
    loaded: tl.tensor,
    opt: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return K and V `[block_n, head_pad]` of a tile; where masked, keys not `loaded` are 0."""
    dims = tl.arange(0, opt.head_pad)
    k_rows = _rows(blocks, begin, opt.kv.k_block, opt.kv.k_slot, opt)
    v_rows = _rows(blocks, begin, opt.kv.v_block, opt.kv.v_slot, opt)
    VECTOR: tl.constexpr = opt.vector
    if VECTOR > 1 and not MASKED:
        v_rows = tl.max_contiguous(tl.multiple_of(v_rows, VECTOR), VECTOR)
    k_dims = (dims // opt.kv.x) * opt.kv.k_outer + dims % opt.kv.x
    k_ptrs = k_head + k_rows[:, None] + k_dims[None, :]
    v_ptrs = v_head + v_rows[:, None] + (dims * opt.kv.v_dim)[None, :]
    if MASKED:
        mask = loaded[:, None] & (dims < opt.head)[None, :]
        return tl.load(k_ptrs, mask=mask, other=0.0), tl.load(v_ptrs, mask=mask, other=0.0)
    elif opt.head != opt.head_pad:
        mask = (dims < opt.head)[None, :]
        return tl.load(k_ptrs, mask=mask, other=0.0), tl.load(v_ptrs, mask=mask, other=0.0)
    else:
        return tl.load(k_ptrs), tl.load(v_ptrs)
