"""What one request's rules make of a row of logits, token by token: the plainest way to say it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from simserve.sampling import RequestSampling

__all__ = ["ruled"]


def ruled(
    logits: torch.Tensor, asked: RequestSampling, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """The logits `[V]` of the next token, in vLLM's order: masks, biases, penalties."""
    out, nothing = logits.clone(), float("-inf")
    for token in range(len(out)):
        if asked.allowed_token_ids is not None and token not in asked.allowed_token_ids:
            out[token] = nothing
    for *before, last in asked.bad_words:
        if list(output[len(output) - len(before) :]) == before:
            out[last] = nothing
    for token in asked.stop_token_ids if len(output) < asked.min_tokens else ():
        out[token] = nothing
    for token, bias in asked.logit_bias.items():
        out[token] += bias
    for token in {*prompt, *output}:
        x, factor = out[token], asked.repetition_penalty
        out[token] = x / factor if x > 0 else x * factor
    for token, times in Counter(output).items():
        out[token] -= asked.frequency_penalty * times + asked.presence_penalty
    return out
