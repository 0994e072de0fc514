"""Verifying drafts in plain torch and float64: what `rejection` must agree with, on any device."""

from __future__ import annotations

from itertools import pairwise

import torch

from simserve_kernels import sampling_reference as sampling
from simserve_kernels.sampling_settings import GREEDY_BELOW, SamplingColumns

__all__ = ["count_accepted", "verify_drafts"]


def verify_drafts(
    logits: torch.Tensor,
    columns: SamplingColumns,
    draft_ids: torch.Tensor,
    query_start: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens `[L]` and accepted drafts `[R]`; arguments as of `rejection.verify_drafts`."""
    tokens = sampling.sample(logits, columns)
    kept = tokens == draft_ids
    if draft_probs is None or columns.path == "greedy":
        return tokens, count_accepted(kept, draft_ids, query_start)
    weights = sampling.kept_weights(logits, columns, sampling.kept_tokens(logits, columns))
    p = weights / weights.sum(-1, keepdim=True)
    q = draft_probs.double()
    at = draft_ids.clamp(min=0).unsqueeze(1)
    seeds, steps = columns.seeds.tolist(), columns.steps.tolist()
    u = torch.tensor(sampling.second_uniforms(seeds, steps), dtype=torch.float64)
    drawn = columns.temperature >= GREEDY_BELOW
    likely = u.to(logits.device) * q.gather(1, at).squeeze(1) < p.gather(1, at).squeeze(1)
    kept = torch.where(drawn, likely, kept) & (draft_ids >= 0)
    running = (p - q).clamp(min=0).cumsum(-1)
    u = torch.tensor(sampling.uniforms(seeds, steps), dtype=torch.float64).to(logits.device)
    instead = (running <= u.unsqueeze(1) * running[:, -1:]).sum(-1)
    replaced = drawn & ~kept & (draft_ids >= 0) & (running[:, -1] > 0)
    tokens = torch.where(replaced, instead, torch.where(kept, draft_ids, tokens))
    return tokens, count_accepted(kept, draft_ids, query_start)


def count_accepted(
    kept: torch.Tensor, draft_ids: torch.Tensor, query_start: torch.Tensor
) -> torch.Tensor:
    """Return how many drafts of each request are kept before the first that is not, `[R]`."""
    counts = []
    bounds = query_start.tolist()
    for first, end in pairwise(bounds):
        right = (kept[first:end] & (draft_ids[first:end] >= 0)).long()
        counts.append(right.cumprod(0).sum())
    return torch.stack(counts)
