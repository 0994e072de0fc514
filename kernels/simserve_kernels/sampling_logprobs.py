"""Log-probabilities beside the chosen tokens, in plain torch on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["TokenLogprobs", "logprobs_of"]


class TokenLogprobs(NamedTuple):
    """Of R rows; column 0 is the chosen token, then come the n likeliest."""

    ids: torch.Tensor
    """int64 `[R, 1 + n]`."""
    logprobs: torch.Tensor
    """float32 `[R, 1 + n]`."""
    ranks: torch.Tensor
    """int64 `[R]`: how many tokens are at least as likely as the chosen one, itself included."""


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> TokenLogprobs:
    """Return log-softmax of raw logits (before masks, penalties and temperature) in float32.

    Nothing waits for the device.

    Args:
        logits: `[R, V]`.
        tokens: the chosen ones, int64 `[R]`.
        n: how many of the likeliest are wanted, 0 for none.

    Raises:
        ValueError: n is not from 0 to V.
    """
    if not 0 <= n <= logits.shape[1]:
        raise ValueError(f"n is {n}: it must be from 0 to the {logits.shape[1]} tokens that exist")
    logprobs = logits.float().log_softmax(-1)
    chosen_ids = tokens.long().unsqueeze(1)
    chosen = logprobs.gather(1, chosen_ids)
    top = logprobs.topk(n, dim=-1)
    return TokenLogprobs(
        ids=torch.cat([chosen_ids, top.indices], dim=1),
        logprobs=torch.cat([chosen, top.values], dim=1),
        ranks=(logprobs >= chosen).sum(-1),
    )
