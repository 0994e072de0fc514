"""Independent random streams of one seed, by purpose: changing one draw disturbs no other."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

__all__ = ["Stream", "generator"]


class Stream(IntEnum):
    """What random numbers are for. The values are part of what a seed means: only add to them."""

    ARRIVALS = 0
    MIX = 1
    PROMPT_LEN = 2
    OUTPUT_LEN = 3
    PREFIX_GROUP = 4
    PREFIX_LEN = 5
    NUM_TURNS = 6
    THINK_TIME = 7
    TIES = 8
    DECODING = 9


def generator(seed: int, stream: Stream, index: int = 0) -> np.random.Generator:
    """The generator of one stream; `index` tells apart streams of one purpose (request classes).

    It is what `SeedSequence(seed).spawn` would give as child `stream`, and that as child `index`.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream, index)))
