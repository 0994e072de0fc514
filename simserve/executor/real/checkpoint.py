"""Weights from `*.safetensors` files of a local folder, under Hugging Face's names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from simserve.errors import ConfigError
from simserve.executor.real.parameters import Parameter

__all__ = ["copy_checkpoint"]

_INDEX = "model.safetensors.index.json"
_NUM_SHOWN = 10
_DTYPES = ("F64", "F32", "F16", "BF16")
"""As the files name them. Quantised weights have scales beside them, which no layer here takes."""


class _Stored(NamedTuple):
    file: Path
    size: tuple[int, ...]
    dtype: str


def copy_checkpoint(
    plan: Iterable[Parameter], parameters: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Copy every source of the plan into its rows of the parameters, converted to their dtype.

    Sizes are compared before the first tensor is read.

    Raises:
        ConfigError: safetensors is not installed, the folder cannot be read, or tensors are
            missing, of another size, of integers or eight bits, or of no use to this model; all of
            them in one error.
    """
    places: dict[str, torch.Tensor] = {}
    for parameter in plan:
        views = parameter.split(parameters[parameter.name])
        places |= {s.name: view for s, view in zip(parameter.sources, views, strict=True)}
    stored = _catalogue(_files(folder))
    _check(places, stored, folder)
    for file in dict.fromkeys(stored[name].file for name in places):
        names = [name for name in places if stored[name].file == file]
        _copy(file, {name: places[name] for name in names})


def _files(folder: Path) -> list[Path]:
    """The shards that the index names, or every file where there is none."""
    index = folder / _INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"{folder}: no *.safetensors here; give a folder that holds a model's weights "
                "(nothing is downloaded), or take random weights"
            )
        return files
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(folder / name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: cannot read the shards' names: {error!r}") from error


def _catalogue(files: Iterable[Path]) -> dict[str, _Stored]:
    """Every tensor's file, size and dtype, from the files' headers."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError(
            "weights from files need the safetensors package: pip install 'simserve[gpu]'"
        ) from None
    stored: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # no mapping: it cannot be iterated
                    one = tensors.get_slice(name)
                    stored[name] = _Stored(file, tuple(one.get_shape()), one.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: cannot read these weights: {error}") from error
    return stored


def _check(places: Mapping[str, torch.Tensor], stored: Mapping[str, _Stored], folder: Path) -> None:
    faults = [f"{name} is missing" for name in places if name not in stored]
    for name, place in places.items():
        size = tuple(place.shape)
        if name in stored and stored[name].size != size:
            faults.append(f"{name} is {list(stored[name].size)}, not {list(size)}")
        if name in stored and stored[name].dtype not in _DTYPES:
            file, dtype = stored[name].file.name, stored[name].dtype
            faults.append(f"{name} in {file} is {dtype}, not one of {', '.join(_DTYPES)}")
    for name in stored:
        if name not in places and not _is_redundant(name):
            faults.append(f"{name} is not a part of this model")
    if faults:
        shown = faults[:_NUM_SHOWN]
        if len(faults) > _NUM_SHOWN:
            shown.append(f"and {len(faults) - _NUM_SHOWN} more")
        raise ConfigError(
            f"{folder}: these weights do not fit the model's config: " + "; ".join(shown)
        )


def _is_redundant(name: str) -> bool:
    """Old checkpoints keep rotary frequencies, some with a tied head keep it as well."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _copy(file: Path, places: Mapping[str, torch.Tensor]) -> None:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        for name, place in places.items():
            place.copy_(tensors.get_tensor(name))
