"""How one request wants its tokens chosen, in the names of vLLM's SamplingParams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

__all__ = ["MOST_BIAS", "MOST_LOGPROBS", "RequestSampling"]

MOST_BIAS = 100
"""What vLLM's server limits biases to: they move tokens to the front or the end, but mask none."""

MOST_LOGPROBS = 20
"""Of the likeliest tokens, those whose log-probabilities a user may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSampling:
    """Settings of one request; the defaults draw from the whole distribution.

    Raises:
        ValueError: a value that means nothing; the message begins with its name.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw among the k likeliest tokens. 0 and −1: all."""
    top_p: float = 1.0
    """Draw among the fewest tokens that have this probability together."""
    min_p: float = 0.0
    """Draw among tokens that have this share of the likeliest one's probability."""
    seed: int | None = None
    """Of the random numbers. None: it follows from the run's seed and the request's id."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that was put out before."""
    frequency_penalty: float = 0.0
    """Taken from it for each time that it was."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or put out before."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """All other tokens are masked. None: none is."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are not put out."""
    min_tokens: int = 0
    """Before so many are put out, no token ends the request."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request; the one that did is the last of its output."""
    ignore_eos: bool = True
    """Whether the model's end-of-sequence token is a token like any other."""
    logprobs: int | None = None
    """Log-probabilities of each token and of so many of the likeliest. None: of none."""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "at least 0")
        _check("top_k", self.top_k, self.top_k >= -1, "at least 1, or 0 or -1 for all tokens")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        if self.seed is not None:
            _check("seed", self.seed, -(2**63) <= self.seed < 2**63, "a number of 64 bits")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2 <= value <= 2, "from -2 to 2")
        value = self.repetition_penalty
        _check("repetition_penalty", value, 0 < value < math.inf, "above 0; 1 is none")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, "at least 0")
        for name, tokens in self.named_tokens.items():
            _check(name, list(tokens), min(tokens, default=0) >= 0, "made of token ids")
        fits = all(-MOST_BIAS <= bias <= MOST_BIAS for bias in self.logit_bias.values())
        what = f"made of numbers from -{MOST_BIAS} to {MOST_BIAS}"
        _check("logit_bias", dict(self.logit_bias), fits, what)
        _check("bad_words", list(self.bad_words), all(self.bad_words), "without empty ones")
        if self.allowed_token_ids is not None:
            _check("allowed_token_ids", "empty", bool(self.allowed_token_ids), "at least one token")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, self.logprobs >= 0, "at least 0")

    @property
    def named_tokens(self) -> dict[str, tuple[int, ...]]:
        """The tokens that occur in each setting."""
        return {
            "stop_token_ids": tuple(self.stop_token_ids),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "logit_bias": tuple(self.logit_bias),
            "bad_words": tuple(chain.from_iterable(self.bad_words)),
        }

    def contradiction(
        self, vocab_size: int, eos_token_ids: Iterable[int] = ()
    ) -> tuple[str, str] | None:
        """A setting that leaves no token to choose from beside the others, and why.

        Bad words of several tokens are not weighed: they forbid one only behind the others.
        """
        allowed: Sequence[int] = range(vocab_size)
        of_what = "the vocabulary"
        if self.allowed_token_ids is not None:
            allowed, of_what = self.allowed_token_ids, "allowed_token_ids"
        masked = {word[0] for word in self.bad_words if len(word) == 1}
        if all(token in masked for token in allowed):
            return "bad_words", f"leave none of {of_what}"
        if not self.min_tokens:
            return None
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        if all(token in ends or token in masked for token in allowed):
            those = f"all of {of_what} that bad_words leave" if masked else f"all of {of_what}"
            return "min_tokens", f"{those} end a request: none is left before that"
        return None


def _check(name: str, value: object, holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}: it must be {what}")
