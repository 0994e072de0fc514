"""How each request wants its tokens drawn, and the settings of a batch as columns of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from simserve_kernels.checks import check_dtype, check_last_dim_contiguous, check_shape

__all__ = [
    "GREEDY_BELOW",
    "LARGEST_LOGIT",
    "LEAST_TEMPERATURE",
    "PROMPT_BIT",
    "RuleColumns",
    "SamplingColumns",
    "SamplingParams",
    "SamplingPath",
    "TokenLogprobs",
]

SamplingPath = Literal["greedy", "random", "mixed"]
"""All rows take the likeliest token; all are drawn; some of each."""

_MOST_TOP_K = 2**31 - 1
"""What an int32 holds. Beyond a vocabulary it cuts nothing."""
GREEDY_BELOW = 1e-5
"""Temperatures below it mean the likeliest token."""

LARGEST_LOGIT = 1e30
"""Larger ones count as it, and what is below its negative as −∞: products with it are finite."""

LEAST_TEMPERATURE = 0.01
"""What a temperature above 0 and below it is raised to, as vLLM's front end does."""


PROMPT_BIT = 1 << 30
"""In the counts of a request's tokens: the token stands in its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks for; the defaults draw from the whole distribution.

    Raises:
        ValueError: a number that means nothing.
    """

    seed: int
    """Of the request's random numbers: the same seed draws the same tokens from the same logits,
    whatever else is in the batch."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw among the k likeliest, and those as likely as the last of them; 0 and −1: all."""
    top_p: float = 1.0
    """Draw among the fewest tokens that together have this probability; 1: all."""
    min_p: float = 0.0
    """Draw among tokens that have this share of the likeliest one's probability; 0: all."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}: it must be a number, at least 0")
        if self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}: it must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}: it must be from 0 to 1")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}: it must fit into 64 bits")

    @property
    def effective_temperature(self) -> float:
        """The temperature that logits are divided by; 0 takes the likeliest token."""
        return max(self.temperature, LEAST_TEMPERATURE) if self.temperature else 0.0


class SamplingColumns(NamedTuple):
    """The settings of R requests. A column that is None is off for all of them.

    Values live on the device and are not checked there: temperatures are finite and not negative,
    top_p and min_p from 0 to 1. Rows of `top_k` that are not in 1 … vocabulary − 1, of `top_p` that
    are 1 or of `min_p` that are 0 filter nothing.
    """

    path: SamplingPath
    """What the temperatures are: below 1e-5 is greedy."""
    temperature: torch.Tensor
    """float32 `[R]`."""
    seeds: torch.Tensor
    """int64 `[R]`."""
    steps: torch.Tensor
    """int64 `[R]`: which draw of its request this is. Each takes random numbers of its own."""
    top_k: torch.Tensor | None = None
    """int32 `[R]`."""
    top_p: torch.Tensor | None = None
    """float32 `[R]`."""
    min_p: torch.Tensor | None = None
    """float32 `[R]`."""

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], steps: Sequence[int], device: str | torch.device
    ) -> SamplingColumns:
        """Build the columns of requests; one that no request uses is None."""
        temperatures = [one.effective_temperature for one in params]
        greedy = [temperature < GREEDY_BELOW for temperature in temperatures]
        path: SamplingPath = "greedy" if all(greedy) else "mixed" if any(greedy) else "random"
        top_k = [min(max(0, one.top_k), _MOST_TOP_K) for one in params]
        top_p = [one.top_p for one in params]
        min_p = [one.min_p for one in params]

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            path=path,
            temperature=column(temperatures, torch.float32),
            seeds=column([one.seed for one in params], torch.int64),
            steps=column(steps, torch.int64),
            top_k=column(top_k, torch.int32) if any(top_k) else None,
            top_p=column(top_p, torch.float32) if min(top_p, default=1) < 1 else None,
            min_p=column(min_p, torch.float32) if any(min_p) else None,
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The columns by name."""
        named: dict[str, torch.Tensor | None] = self._asdict()
        del named["path"]
        return named

    def check(self, num_rows: int) -> None:
        """Refuse columns that do not fit `num_rows` rows of logits.

        Raises:
            TypeError: a column of another dtype.
            ValueError: a column of another length, or one that is strided.
        """
        floats = {"temperature", "top_p", "min_p"}
        for name, column in self.tensors.items():
            if column is None:
                continue
            integer = torch.int32 if name == "top_k" else torch.int64
            check_dtype(name, column, (torch.float32 if name in floats else integer,))
            check_shape(name, column, (num_rows,))
            if not column.is_contiguous():
                raise ValueError(f"{name} is strided: a column must be contiguous")


class RuleColumns(NamedTuple):
    """What N requests want done to their logits, and what that needs to know of their tokens.

    Groups that are None are off for all of them. An entry concerns one token: `entry_values` is
    added to its logit, or masks it if it is −∞, while its position is in
    [`entry_since`, `entry_until`) and the tokens before are those of `entry_before`, the last first
    (−1: any). Of one request no two finite entries have the same token.
    """

    has_entries: torch.Tensor
    """int32 `[N]`: 0: none of the entries of this row holds."""
    has_tokens: torch.Tensor
    """int32 `[N]`: 0: all tokens are allowed, and none is penalised."""
    entry_tokens: torch.Tensor | None = None
    """int32 `[N, E]`; −1: no entry."""
    entry_values: torch.Tensor | None = None
    """float32 `[N, E]`."""
    entry_since: torch.Tensor | None = None
    """int32 `[N, E]`."""
    entry_until: torch.Tensor | None = None
    """int32 `[N, E]`."""
    entry_before: torch.Tensor | None = None
    """int32 `[N, E, P]`; None: P is 0."""
    allowed: torch.Tensor | None = None
    """int32 `[N, ⌈V / 32⌉]`: a bit a token, the lowest first."""
    counts: torch.Tensor | None = None
    """int32 `[N, V]`: how often a token was put out, and `PROMPT_BIT` if it is in the prompt."""
    presence: torch.Tensor | None = None
    """float32 `[N]`."""
    frequency: torch.Tensor | None = None
    """float32 `[N]`."""
    repetition: torch.Tensor | None = None
    """float32 `[N]`."""

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The columns by name."""
        named: dict[str, torch.Tensor | None] = self._asdict()
        return named

    def check(self, vocab_size: int) -> None:
        """Refuse columns that do not fit together, or not the vocabulary.

        Raises:
            TypeError: a column of another dtype.
            ValueError: a column of another shape, or one that is strided.
        """
        n = len(self.has_entries)
        entries = (n, -1 if self.entry_tokens is None else self.entry_tokens.shape[-1])
        shapes: dict[str, tuple[int | str, ...]] = {
            "allowed": (n, -(-vocab_size // 32)),
            "counts": (n, vocab_size),
            "entry_before": (*entries, "before"),
            **dict.fromkeys(
                ("entry_tokens", "entry_values", "entry_since", "entry_until"), entries
            ),
        }
        floats = {"entry_values", "presence", "frequency", "repetition"}
        for name, column in self.tensors.items():
            if column is None:
                continue
            check_dtype(name, column, (torch.float32 if name in floats else torch.int32,))
            check_shape(name, column, shapes.get(name, (n,)))
            if not column.is_contiguous():
                raise ValueError(f"{name} is strided: a column must be contiguous")


class TokenLogprobs(NamedTuple):
    """Log-probabilities of R chosen tokens, and of the n likeliest beside each."""

    ids: torch.Tensor
    """int32 `[R, 1 + n]`: the chosen token, then the likeliest; equal ones in order of id."""
    logprobs: torch.Tensor
    """float32 `[R, 1 + n]`: of `ids`, by raw logits: before masks, penalties and temperature."""
    ranks: torch.Tensor
    """int32 `[R]`: how many tokens are at least as likely as the chosen one, itself included."""

    def check(self, num_rows: int) -> None:
        """Refuse columns that do not fit.

        Raises:
            TypeError, ValueError: a dtype, a shape, or entries of a row that lie apart.
        """
        width = self.ids.shape[-1]
        for name, one, dtype in (
            ("ids", self.ids, torch.int32),
            ("logprobs", self.logprobs, torch.float32),
        ):
            check_dtype(name, one, (dtype,))
            check_shape(name, one, (num_rows, width))
            check_last_dim_contiguous(name, one)
        check_dtype("ranks", self.ranks, (torch.int32,))
        check_shape("ranks", self.ranks, (num_rows,))
