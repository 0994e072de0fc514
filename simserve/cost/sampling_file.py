"""The file format of what choosing tokens was measured to cost on a GPU."""

from __future__ import annotations

from importlib.resources import files
from itertools import chain, pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["METHODS", "SamplingFile", "Table", "load_sampling", "sampling_gpus"]

METHODS = ("argmax", "greedy", "temperature", "top_k", "top_p", "min_p", "top_k top_p", "penalties")
"""`argmax` is what an engine does that never samples, and `penalties` come on top of the others."""

Table = tuple[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)], ...], ...]
"""Seconds: a row a vocabulary, a column a number of rows of logits."""
Sizes = Annotated[tuple[int, ...], Field(min_length=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Errors(_Strict):
    """Of |predicted - measured| / measured."""

    mean: float
    largest: float


class SamplingFile(_Strict):
    """Times as they stand in their JSON file."""

    schema_version: Literal[1]
    gpu: str
    measured_on: str
    """GPU, software and date."""
    logits: str
    """What was sampled from."""
    source: str
    """The file of measurements."""
    sha256: str
    """Of that file."""
    num_rows: Sizes
    """Rows of logits of the steps that were measured."""
    vocab_sizes: Sizes
    methods: dict[str, Table]
    logprobs: Annotated[dict[int, Table], Field(min_length=1)]
    """By number of log-probabilities a row."""
    errors: dict[str, Errors]
    """`between_rows`: of each inner number of rows, from its neighbours; `between_vocabularies`
    likewise; `mixed`: of batches of greedy and top-p rows, from those of one method."""

    @model_validator(mode="after")
    def _check(self) -> SamplingFile:
        if set(self.methods) != set(METHODS):
            raise ValueError(f"methods must be {', '.join(METHODS)}")
        if 0 not in self.logprobs:
            raise ValueError("logprobs must begin with 0")
        for sizes in (self.num_rows, self.vocab_sizes):
            if any(low >= high for low, high in pairwise(sizes)):
                raise ValueError("num_rows and vocab_sizes must increase")
        wanted = (len(self.vocab_sizes), len(self.num_rows))
        for table in chain(self.methods.values(), self.logprobs.values()):
            if (len(table), *{len(row) for row in table}) != wanted:
                raise ValueError("a table has a row a vocabulary and a column a number of rows")
        return self


def sampling_gpus() -> list[str]:
    """The GPUs on which sampling was measured."""
    folder = files("simserve.presets").joinpath("sampling")
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(entry.name.removesuffix(".json") for entry in found)


def load_sampling(gpu: str) -> SamplingFile:
    """What was measured on one of `sampling_gpus`."""
    file = files("simserve.presets").joinpath("sampling", f"{gpu}.json")
    return SamplingFile.model_validate_json(file.read_text(encoding="utf-8"), strict=False)
