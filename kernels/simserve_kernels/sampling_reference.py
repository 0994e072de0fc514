"""Sampling in plain torch: what the kernels must agree with, on any device and in any precision.

The order is that of vLLM: masks, biases and penalties (`apply_rules`), then temperature, min-p,
top-k, top-p, draw.
"""

from __future__ import annotations

import torch

from simserve_kernels.sampling_settings import (
    GREEDY_BELOW,
    LARGEST_LOGIT,
    PROMPT_BIT,
    RuleColumns,
    SamplingColumns,
    TokenLogprobs,
)

__all__ = [
    "apply_rules",
    "argmax",
    "draw",
    "kept_tokens",
    "kept_weights",
    "logprobs_of",
    "sample",
    "store_logprobs",
    "uniforms",
]

_WORD = 0xFFFFFFFF


def sample(
    logits: torch.Tensor, columns: SamplingColumns, *, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return the tokens, int64 `[R]`, of logits `[R, V]`, computed in `dtype`.

    Batches that are all greedy end after the argmax, batches that are all random do without it, and
    mixed ones compute both and select.
    """
    if columns.path == "greedy":
        return argmax(logits)
    drawn = draw(logits, columns, kept_tokens(logits, columns, dtype=dtype))
    if columns.path == "random":
        return drawn
    return torch.where(columns.temperature < GREEDY_BELOW, argmax(logits), drawn)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest logits; NaN counts as −∞."""
    x = _numbers(logits, torch.float64)
    largest = x.amax(-1, keepdim=True)
    return (x == largest).int().argmax(-1)


def kept_tokens(
    logits: torch.Tensor, columns: SamplingColumns, *, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return which tokens are left to draw from, bool `[R, V]`.

    All tokens as likely as the k-th stay. Of tokens that are as likely as the last that top-p
    needs, the first ones stay. A token of probability 0 never does, in a row that has another.
    """
    x = _numbers(logits, dtype) / _temperature(columns, dtype)
    x = x - x.amax(-1, keepdim=True)
    nothing = torch.full_like(x, -torch.inf)
    if columns.min_p is not None:
        least = columns.min_p.to(dtype).unsqueeze(1)
        x = torch.where(x.exp() < least, nothing, x)
    if columns.top_k is not None:
        k = columns.top_k.long().unsqueeze(1)
        on = (k >= 1) & (k < x.shape[1])
        place = torch.where(on, k - 1, 0)
        last = x.sort(descending=True, dim=-1).values.gather(1, place)
        x = torch.where(on & (x < last), nothing, x)
    kept = x > -torch.inf
    if columns.top_p is not None:
        weights, order = x.exp().sort(descending=True, stable=True, dim=-1)
        p = columns.top_p.to(dtype).unsqueeze(1)
        before = weights.cumsum(-1) - weights
        needed = (before < p * weights.sum(-1, keepdim=True)) | (p >= 1)
        needed[:, 0] = True
        kept &= torch.zeros_like(kept).scatter(1, order, needed)
    return kept


def draw(logits: torch.Tensor, columns: SamplingColumns, kept: torch.Tensor) -> torch.Tensor:
    """Draw a token of each row of `kept`: the first whose running sum of weights exceeds u · sum.

    A row that has nothing above −∞ gives token 0.
    """
    weights = kept_weights(logits, columns, kept)
    running = weights.cumsum(-1)
    u = torch.tensor(uniforms(columns.seeds.tolist(), columns.steps.tolist()), dtype=torch.float64)
    place = u.to(logits.device).unsqueeze(1) * running[:, -1:]
    return (running <= place).sum(-1).where(running[:, -1] > 0, 0)


def kept_weights(
    logits: torch.Tensor, columns: SamplingColumns, kept: torch.Tensor
) -> torch.Tensor:
    """Return e^((x − largest) / t) of the kept tokens, 0 of all others, float64 `[R, V]`."""
    x = _numbers(logits, torch.float64)
    largest = x.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = ((x - largest) / _temperature(columns, torch.float64)).exp()
    return weights.where(kept, 0.0)


def uniforms(seeds: list[int], steps: list[int]) -> list[float]:
    """Return u in [0, 1) of each (seed, step): the first 64 bits of Philox-4×32-10.

    (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.)
    """
    return [_philox(seed, step) / 2.0**64 for seed, step in zip(seeds, steps, strict=True)]


def _philox(seed: int, step: int) -> int:
    c0, c1, c2, c3 = step & _WORD, step >> 32 & _WORD, 0, 0
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & _WORD, a >> 32 ^ c3 ^ k1, a & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0 << 32 | c1


def apply_rules(
    logits: torch.Tensor,
    columns: RuleColumns,
    rows: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Change logits `[L, V]` in place; arguments as of `sampling_rules.apply_rules`."""
    if columns.entry_tokens is not None:
        _apply_entries(logits, columns, rows, positions, ids)
    if columns.allowed is not None:
        token = torch.arange(logits.shape[1], device=logits.device)
        bits = columns.allowed[rows][:, token >> 5] >> (token & 31) & 1
        logits.masked_fill_(bits == 0, -torch.inf)
    if columns.counts is not None:
        seen = columns.counts[rows]
        repetition, frequency, presence = (
            one[rows].to(logits.dtype).unsqueeze(1)
            for one in (columns.repetition, columns.frequency, columns.presence)
            if one is not None
        )
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        times = seen & PROMPT_BIT - 1
        logits.copy_(torch.where(seen == 0, logits, repeated))
        logits -= frequency * times + presence * (times > 0)


def _apply_entries(
    logits: torch.Tensor,
    columns: RuleColumns,
    rows: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    token, value, since, until = (
        one[rows]
        for one in (
            columns.entry_tokens,
            columns.entry_values,
            columns.entry_since,
            columns.entry_until,
        )
        if one is not None
    )
    place = positions.unsqueeze(1)
    holds = (token >= 0) & (place >= since) & (place < until)
    before = columns.entry_before
    for back in range(0 if before is None else before.shape[2]):
        assert before is not None
        wanted = before[rows, :, back]
        had = ids[rows, (positions - 1 - back).clamp(min=0)].unsqueeze(1)
        holds &= (wanted < 0) | (wanted == had)
    added = torch.zeros_like(logits)
    at = token.clamp(min=0).long()
    added.scatter_add_(1, at, torch.where(holds, value, 0.0).to(logits.dtype))
    logits += added


def store_logprobs(
    out: TokenLogprobs, logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor
) -> None:
    """Fill the rows of `out` that ask; arguments as of `sampling_logprobs.store_logprobs`."""
    rows = (wanted >= 0).nonzero()[:, 0]
    found = logprobs_of(logits[rows], tokens[rows], out.ids.shape[1] - 1)
    for column, values in zip(out, found, strict=True):
        column[rows] = values


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> TokenLogprobs:
    """Return log-softmax in float32 of the chosen tokens `[R]` and of the n likeliest of each row.

    Ranks are by logits, which are in order where rounded log-probabilities are equal.
    """
    x = logits.float()
    logprobs = x.log_softmax(-1)
    chosen = tokens.long().unsqueeze(1)
    order = x.sort(dim=-1, descending=True, stable=True).indices
    ids = torch.cat([chosen, order[:, :n]], dim=1)
    return TokenLogprobs(
        ids=ids.int(),
        logprobs=logprobs.gather(1, ids),
        ranks=(x >= x.gather(1, chosen)).sum(-1, dtype=torch.int32),
    )


def _numbers(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = logits.to(dtype).clamp(max=LARGEST_LOGIT)
    return x.where(x > -LARGEST_LOGIT, -torch.inf)


def _temperature(columns: SamplingColumns, dtype: torch.dtype) -> torch.Tensor:
    """`[R, 1]`, never 0: nobody uses what a greedy row would draw."""
    return columns.temperature.to(dtype).clamp(min=GREEDY_BELOW).unsqueeze(1)
