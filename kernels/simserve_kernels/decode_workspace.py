"""Scratch of the `auto` decode, and how many chunks fill a GPU, which its size follows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from simserve_kernels.decode_call import DecodeCall

__all__ = [
    "MAX_PROGRAMS_PER_SM",
    "DecodeWorkspace",
    "SplitGrid",
    "decode_workspace",
    "fitting_workspace",
    "num_sms",
    "split_grid",
]

MAX_PROGRAMS_PER_SM = 4

_INTERPRETED_SMS = 1


class DecodeWorkspace(NamedTuple):
    """What chunks leave for the merge, float32.

    One workspace serves calls that run one after another on one stream, as the layers of a step
    do: of any lengths, and of at most as many sequences as it was made for.
    """

    partials: torch.Tensor  # [chunks, num_heads, head_size]
    maxima: torch.Tensor  # [chunks, num_heads]
    sums: torch.Tensor  # [chunks, num_heads]


class SplitGrid(NamedTuple):
    """The grid of a call: `programs` × `max_chunks`."""

    rows: int  # query heads of a program
    programs: int  # that share a chunk: one a KV head, or more if its query heads are many
    budget: int  # chunks that fill the GPU
    max_chunks: int


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the multiprocessors of a GPU."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def split_grid(
    device: torch.device, num_seqs: int, num_heads: int, num_kv_heads: int, programs_per_sm: int
) -> SplitGrid:
    """Return the grid for `num_seqs` sequences: it depends on nothing that only the GPU knows."""
    group = num_heads // num_kv_heads
    rows = int(min(64, max(16, triton.next_power_of_2(group))))
    programs = num_kv_heads * int(triton.cdiv(group, rows))
    budget = max(1, num_sms(device) * programs_per_sm // programs)
    return SplitGrid(rows, programs, budget, 2 * budget + num_seqs)


def decode_workspace(
    max_num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    device: torch.device | str,
) -> DecodeWorkspace:
    """Return an uninitialised workspace for `paged_decode` of at most `max_num_seqs` sequences."""
    where = torch.empty(0, device=device).device
    grid = split_grid(where, max_num_seqs, num_heads, num_kv_heads, MAX_PROGRAMS_PER_SM)
    return _allocate(grid.max_chunks, num_heads, head_size, where)


def _allocate(chunks: int, num_heads: int, head_size: int, device: torch.device) -> DecodeWorkspace:
    partials = torch.empty(chunks, num_heads, head_size, dtype=torch.float32, device=device)
    # Not one tensor for both: where its second half begins, and how aligned that is, would vary.
    maxima = torch.empty(chunks, num_heads, dtype=torch.float32, device=device)
    return DecodeWorkspace(partials, maxima, torch.empty_like(maxima))


def fitting_workspace(
    call: DecodeCall, max_chunks: int, given: DecodeWorkspace | None
) -> DecodeWorkspace:
    """Return the given workspace if it fits, or a new one if none is given.

    Raises:
        ValueError: it was made for fewer sequences, for another model, or on another device.
    """
    if given is None:
        return _allocate(max_chunks, call.num_heads, call.head_size, call.q.device)
    chunks, *shape = given.partials.shape
    wanted = [call.num_heads, call.head_size]
    if chunks < max_chunks or shape != wanted or given.partials.device != call.q.device:
        raise ValueError(
            f"the workspace holds {chunks} chunks of {shape} on {given.partials.device}: "
            f"the call needs {max_chunks} of {wanted} on {call.q.device}"
        )
    return given
