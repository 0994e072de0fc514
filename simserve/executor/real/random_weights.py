"""Random weights that are a function of seed, tensor name and element, the same on every device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping

import torch

from simserve.executor.real.parameters import Parameter

__all__ = ["fill_random"]

_STD = 0.02
_CHUNK = 1 << 22
"""Elements drawn at once: what bounds the scratch memory."""
_ROUNDS = ((0x2C1B3C6D, 16), (0x297A2D39, 15), (0x7FEB352D, 16))
"""Odd factors and shifts of the hash."""


def fill_random(
    plan: Iterable[Parameter], parameters: Mapping[str, torch.Tensor], seed: int
) -> None:
    """Fill the parameters in place: norms with 1, all else uniform with mean 0 and std 0.02.

    torch's own generators draw other numbers on another device; a hash of the element's index
    does not, and integers are exact everywhere.
    """
    for parameter in plan:
        tensor = parameters[parameter.name]
        if parameter.name.endswith("norm"):
            tensor.fill_(1.0)
            continue
        for source, part in zip(parameter.sources, parameter.split(tensor), strict=True):
            _fill(part.view(-1), zlib.crc32(f"{seed}/{source.name}".encode()))


def _fill(flat: torch.Tensor, key: int) -> None:
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        index = torch.arange(start, start + len(part), dtype=torch.int32, device=flat.device)
        # The centre of one of 2^24 equal cells of (-1, 1): exact in float32.
        unit = (_hash(index, key) >> 8).to(torch.float32).add_(0.5).mul_(2.0**-23)
        part.copy_(unit.mul_(_STD * math.sqrt(3)))


def _hash(x: torch.Tensor, key: int) -> torch.Tensor:
    """Permute the 32-bit integers in place: products modulo 2^32, xor-shifts, the key."""
    for factor, shift in _ROUNDS:
        x.mul_(factor)
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        x.bitwise_xor_(key - 2**31)
    return x
