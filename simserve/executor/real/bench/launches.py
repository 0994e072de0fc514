"""Which Triton kernels a call launches, and what each takes of a multiprocessor."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton

__all__ = ["Launch", "recorded_launches"]

_TILE = {
    "tile",
    "block",
    "block_m",
    "block_n",
    "block_k",
    "rows",
    "tokens",
    "elements",
    "partition",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel as it was compiled for a call."""

    kernel: str
    tile: dict[str, int]
    """Its sizes that were chosen for the call, by the kernel's own names."""
    num_warps: int
    num_stages: int
    registers: int
    """Of a thread."""
    spills: int
    """Registers of a thread that live in memory instead."""
    shared_bytes: int
    """Shared memory of a program."""
    programs_per_sm: int | None
    """How many programs a multiprocessor holds, as the driver says; None: it was not asked."""
    occupancy: float | None
    """Share of a multiprocessor's warps that these are."""


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Collect the kernels that are launched within the block, equal ones once.

    There are none under Triton's interpreter, which compiles nothing.
    """
    found: list[Launch] = []
    jit_function = triton.runtime.jit.JITFunction
    original = jit_function.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = original(self, *args, **kwargs)
        launch = _describe(self, kernel, args, kwargs)
        if launch not in found:
            found.append(launch)
        return kernel

    jit_function.run = run
    try:
        yield found
    finally:
        jit_function.run = original


def _describe(function: Any, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    programs = _programs_per_sm(kernel)
    return Launch(
        kernel=kernel.metadata.name,
        tile=_tile({**dict(zip(function.arg_names, args, strict=False)), **kwargs}),
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=kernel.n_regs,
        spills=kernel.n_spills,
        shared_bytes=kernel.metadata.shared,
        programs_per_sm=programs,
        occupancy=None if programs is None else programs * kernel.metadata.num_warps / _warps(),
    )


def _tile(arguments: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in arguments.items():
        if hasattr(value, "_asdict"):
            found |= _tile(value._asdict())
        elif type(value) is int and name.lower() in _TILE:
            found[name.lower()] = value
    return found


def _programs_per_sm(kernel: Any) -> int | None:
    """Ask the CUDA driver: registers and shared memory are given out in steps that it knows."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    programs = ctypes.c_int()
    status = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(programs),
        ctypes.c_void_p(kernel.function),
        ctypes.c_int(32 * kernel.metadata.num_warps),
        ctypes.c_size_t(kernel.metadata.shared),
    )
    return programs.value if status == 0 else None


def _warps() -> int:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.max_threads_per_multi_processor) // 32
