"""The tensors of the paged KV cache: their dtype, their size, their allocation."""

from __future__ import annotations

import torch

from simserve.errors import CapacityError, ConfigError, Problem
from simserve.shapes import kv_elements_per_token
from simserve.types import ModelShape
from simserve_kernels.layouts import CacheLayout, CacheShape, allocate_cache, packing

__all__ = ["allocate_caches", "bytes_per_block", "kv_dtype"]


def kv_dtype(name: str, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the cache, by its name in the configuration.

    Raises:
        ConfigError: the kernels read neither the model's dtype nor fp8 e4m3.
    """
    if name in ("auto", str(compute_dtype).removeprefix("torch.")):
        return compute_dtype
    if name in ("fp8", "fp8_e4m3"):
        return torch.float8_e4m3fn
    computed = str(compute_dtype).removeprefix("torch.")
    message = (
        f"the real executor keeps K and V in the model's dtype ({computed}) or in fp8_e4m3, "
        f"not in {name}"
    )
    raise ConfigError([Problem(path="kv_cache.dtype", message=message)])


def bytes_per_block(model: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """K and V of one block in all layers."""
    return int(kv_elements_per_token(model) * block_size * dtype.itemsize)


def allocate_caches(
    model: ModelShape,
    num_blocks: int,
    block_size: int,
    layout: CacheLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, uninitialised: a slot is never read before it is written.

    Raises:
        ConfigError: the packed layout does not divide this head size.
        CapacityError: the device has no room for them.
    """
    if layout == "packed" and model.head_dim % packing(dtype):
        message = f"packed takes {packing(dtype)} elements of a head together; {model.name} has "
        message += f"heads of {model.head_dim}: use nhd"
        raise ConfigError([Problem(path="executor.kv_layout", message=message)])
    shape = CacheShape(num_blocks, block_size, model.num_key_value_heads, model.head_dim)
    try:
        return [
            allocate_cache(shape, layout, dtype, device) for _ in range(model.num_hidden_layers)
        ]
    except RuntimeError as error:  # torch's OutOfMemoryError is one; on a CPU there is no other
        needed = num_blocks * bytes_per_block(model, block_size, dtype) / 2**30
        raise CapacityError(
            f"kv_cache.num_gpu_blocks: {num_blocks} blocks of {block_size} tokens take "
            f"{needed:.2f} GiB, more than {device} has free; take fewer, or auto"
        ) from error
