"""The cases of `simserve bench kernels` that choose tokens. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

__all__ = ["SAMPLE_WAYS", "SHARED_K", "LogitsKind", "SampleCase", "sample_cases"]

SAMPLE_WAYS = ("sampler", "torch")
SHARED_K = 50
"""Of all rows with a top-k."""
LogitsKind = Literal["normal", "peaked", "equal"]

_GREEDY: dict[str, Any] = {"temperature": 0}
_METHODS: dict[str, tuple[dict[str, Any], ...]] = {
    "argmax": (_GREEDY,),
    "plain": ({},),
    "top_k": ({"top_k": SHARED_K},),
    "top_p": ({"top_p": 0.9},),
    "min_p": ({"min_p": 0.05},),
    "top_k top_p": ({"top_k": SHARED_K, "top_p": 0.9},),
    "mixed": (_GREEDY, _GREEDY, _GREEDY, *[{"top_p": 0.9}] * 7),
}
"""What the rows of a batch ask for, in turns."""
_OTHER_LOGITS: tuple[tuple[str, LogitsKind, str], ...] = (
    ("top_p", "peaked", "float32"),
    ("top_p", "equal", "float32"),
    ("argmax", "normal", "bfloat16"),
    ("top_p", "normal", "bfloat16"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCase:
    """A token for each row of logits.

    `normal` logits have a standard deviation of 2.5, in `peaked` ones 40 tokens stand out by up to
    15, and `equal` ones are all the same, which no guess narrows down.
    """

    name: str
    batch: int
    settings: tuple[dict[str, Any], ...] = field(hash=False)
    """Of `SamplingParams`, without seeds; rows take them in turns."""
    kind: LogitsKind = "normal"
    dtype: str = "float32"
    vocab_size: int = 128_256
    flops: None = None

    @property
    def ways(self) -> tuple[str, ...]:
        """By the kernels, and by torch's own sort, topk and softmax."""
        return SAMPLE_WAYS

    @property
    def num_bytes(self) -> int:
        """The logits, read once."""
        return self.batch * self.vocab_size * (4 if self.dtype == "float32" else 2)


def sample_cases() -> Iterator[SampleCase]:
    """Yield all of them."""
    for method, batch in product(_METHODS, (1, 64, 256)):
        if batch >= len(_METHODS[method]):
            name = f"sample {method} b{batch}"
            yield SampleCase(name=name, batch=batch, settings=_METHODS[method])
    for method, kind, dtype in _OTHER_LOGITS:
        extra = dtype if kind == "normal" else kind
        yield SampleCase(
            name=f"sample {method} b64 {extra}",
            batch=64,
            settings=_METHODS[method],
            kind=kind,
            dtype=dtype,
        )
