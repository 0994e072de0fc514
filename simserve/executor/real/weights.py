"""A decoder with its weights: random ones from a seed, or those of a local checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from simserve.errors import CapacityError, ConfigError, did_you_mean
from simserve.executor.real.checkpoint import copy_checkpoint
from simserve.executor.real.decoder_shape import DecoderShape
from simserve.executor.real.memory import free_host_bytes
from simserve.executor.real.model import Decoder
from simserve.executor.real.ops import OpsKind, load_ops
from simserve.executor.real.parameters import Parameter, decoder_parameters
from simserve.executor.real.random_weights import fill_random
from simserve.executor.real.rotary import rope_table

__all__ = ["load_decoder", "torch_dtype"]

_DTYPES = ("float64", "float32", "bfloat16", "float16")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that a model of this dtype computes in.

    Raises:
        ConfigError: the decoder does not compute in it.
    """
    if name not in _DTYPES:
        raise ConfigError(
            f"dtype '{name}' is not supported by the real executor{did_you_mean(name, _DTYPES)}; "
            f"there are {', '.join(_DTYPES)}"
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_decoder(
    shape: DecoderShape,
    *,
    weights: str | Path = "random",
    seed: int = 0,
    dtype: torch.dtype,
    device: str | torch.device,
    ops: OpsKind | None = None,
    max_position: int | None = None,
) -> Decoder:
    """Build a decoder and load its weights.

    Args:
        shape: what to compute.
        weights: `random`, or a local folder with `*.safetensors` under Hugging Face's names.
        seed: of random weights; the same seed gives the same weights on every device.
        dtype: of the parameters; a checkpoint in another dtype is converted.
        device: where the parameters live.
        ops: None: `triton` on a CUDA device, else `torch`.
        max_position: positions there are, at most; None: the model's max_position_embeddings.

    Raises:
        CapacityError: the device has no room for the weights.
        ConfigError: the folder cannot be read, or its tensors are not those of this shape.
    """
    device = torch.device(device)
    kind: OpsKind = ops or ("triton" if device.type == "cuda" else "torch")
    plan = list(decoder_parameters(shape))
    parameters = _allocate(plan, shape.model.name, dtype, device)
    if weights == "random":
        fill_random(plan, parameters, seed)
    else:
        copy_checkpoint(plan, parameters, Path(weights))
    table = rope_table(shape, max_position or shape.model.max_position_embeddings)
    return Decoder(shape, parameters, table.to(device), load_ops(kind))


def _allocate(
    plan: Iterable[Parameter], model: str, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    needed = sum(math.prod(p.size) for p in plan) * dtype.itemsize
    free = free_host_bytes() if device.type == "cpu" else None
    # An allocation that the operating system cannot back succeeds, and kills when it is written.
    if free is not None and needed > free:
        raise _no_room(model, needed, f"{device} has free ({free / 2**30:.1f} GiB)")
    try:
        return {p.name: torch.empty(p.size, dtype=dtype, device=device) for p in plan}
    except RuntimeError as error:
        # A CPU has no exception of its own for this.
        if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
            raise
        raise _no_room(model, needed, f"{device} has free") from None


def _no_room(model: str, needed: int, room: str) -> CapacityError:
    return CapacityError(
        f"the weights of {model} take {needed / 2**30:.1f} GiB, more than {room}; "
        "end what else uses its memory, or take a smaller model"
    )
