"""What kind of batch a step has: errors and scatter of step times are told apart by it."""

from __future__ import annotations

__all__ = ["REGIMES", "regime_of_counts"]

_MANY_DECODES = 32
_FEW_TOKENS, _MANY_TOKENS = 512, 1024

REGIMES = (
    f"decode, up to {_MANY_DECODES} requests",
    f"decode, over {_MANY_DECODES} requests",
    f"prefill, up to {_FEW_TOKENS} tokens",
    f"prefill, up to {_MANY_TOKENS} tokens",
    f"prefill, over {_MANY_TOKENS} tokens",
    f"mixed, up to {_FEW_TOKENS} tokens",
    f"mixed, up to {_MANY_TOKENS} tokens",
    f"mixed, over {_MANY_TOKENS} tokens",
)
"""All kinds, each without what an earlier one has. A decode has one token, a prefill more; mixed:
both are there."""


def regime_of_counts(num_tokens: int, num_reqs: int, num_decodes: int) -> str:
    """The kind of a step with so many tokens, requests, and requests with one token.

    >>> regime_of_counts(2048, 3, 2)
    'mixed, over 1024 tokens'
    """
    if num_decodes == num_reqs:
        return REGIMES[num_reqs > _MANY_DECODES]
    kind = 5 if num_decodes else 2
    return REGIMES[kind + (num_tokens > _FEW_TOKENS) + (num_tokens > _MANY_TOKENS)]
