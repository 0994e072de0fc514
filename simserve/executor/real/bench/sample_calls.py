"""Inputs of a sampling case, the same tokens by torch alone, and whether a call was right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from simserve.executor.real.bench.sample_cases import SHARED_K, LogitsKind, SampleCase
from simserve.executor.real.bench.timing import Call
from simserve_kernels import sampling_reference as reference
from simserve_kernels.sampling import SampledRows, sample
from simserve_kernels.sampling_settings import SamplingColumns, SamplingParams

__all__ = ["SampleInputs", "torch_sample"]

_ROTATED_BYTES = 2 << 30
_MAX_COPIES = 256
_CLOSE = 1e-4
"""Of the sum of weights: by so much the cut and the draw may be off in float32."""


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """One copy of a case: logits, and the settings of their rows."""

    logits: torch.Tensor
    columns: SamplingColumns

    @classmethod
    def copies(
        cls, case: SampleCase, device: str, max_copies: int = _MAX_COPIES
    ) -> list[SampleInputs]:
        """Make as many copies as hold two GiB, at most 256."""
        count = max(1, min(max_copies, -(-_ROTATED_BYTES // case.num_bytes)))
        asked = [case.settings[row % len(case.settings)] for row in range(case.batch)]
        params = [SamplingParams(seed=row, **settings) for row, settings in enumerate(asked)]
        shape = (case.batch, case.vocab_size)
        return [
            cls(
                _logits(shape, case.kind, getattr(torch, case.dtype), device),
                SamplingColumns.of(params, [copy] * case.batch, device),
            )
            for copy in range(count)
        ]

    def call(self, way: str) -> Call:
        """The call that computes this copy: by the kernels, or by torch."""
        return partial(sample if way == "sampler" else torch_sample, self.logits, self.columns)

    def error(self, out: object) -> float:
        """How far a token is from where its random number points, as a share of the sum of weights.

        Torch draws other random numbers: of its tokens, the share that should not have been kept.
        Greedy tokens that are not the largest logit count as 1.
        """
        columns, logits = self.columns, self.logits
        tokens = out.tokens if isinstance(out, SampledRows) else out
        assert isinstance(tokens, torch.Tensor)
        greedy = columns.temperature < 1e-5
        wrong = greedy & (tokens != reference.argmax(logits))
        if columns.path == "greedy":
            return float(wrong.double().mean())
        top_p, place = columns.top_p, tokens.unsqueeze(1)
        if top_p is not None:
            top_p = (top_p.double() * (1 + _CLOSE)).where(top_p < 1, 1.0)
        kept = reference.kept_tokens(logits, columns._replace(top_p=top_p))
        outside = ~kept.gather(1, place)[:, 0] & ~greedy
        if not isinstance(out, SampledRows):
            return float((wrong | outside).double().mean())
        weights = reference.kept_weights(logits, columns, reference.kept_tokens(logits, columns))
        running = weights.cumsum(-1)
        after = running.gather(1, place)[:, 0]
        before = after - weights.gather(1, place)[:, 0]
        u = reference.uniforms(columns.seeds.tolist(), columns.steps.tolist())
        point = torch.tensor(u, dtype=torch.float64, device=logits.device) * running[:, -1]
        off = torch.maximum(before - point, point - after).clamp(min=0) / running[:, -1]
        off = off.where(~greedy, 0.0)
        return float(torch.where(wrong | outside, 1.0, off).max())


def _logits(
    shape: tuple[int, int], kind: LogitsKind, dtype: torch.dtype, device: str
) -> torch.Tensor:
    if kind == "equal":
        return torch.ones(shape, device=device, dtype=dtype)
    logits = torch.randn(shape, device=device) * 2.5
    if kind == "peaked":
        tall = torch.randint(shape[1], (shape[0], 40), device=device)
        logits.scatter_add_(1, tall, 15 * torch.rand(tall.shape, device=device))
    return logits.to(dtype)


def torch_sample(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Return tokens by torch's own operations, as is usual without a kernel.

    Top-k by topk, top-p by sort, softmax, cumsum and scatter, min-p by softmax, amax and a mask;
    then a race of exponential numbers. Of top-k all rows have the same k.
    """
    if columns.path == "greedy":
        return logits.argmax(-1)
    x = logits.float() / columns.temperature.clamp(min=1e-5).unsqueeze(1)
    ids = None
    if columns.top_k is not None:
        x, ids = x.topk(min(SHARED_K, x.shape[1]), dim=-1)
    if columns.top_p is not None:
        x, order = x.sort(dim=-1, descending=True)
        probs = x.softmax(-1)
        above = probs.cumsum(-1) - probs
        probs = probs.masked_fill(above >= columns.top_p.unsqueeze(1), 0)
        probs = torch.empty_like(probs).scatter_(1, order, probs)
    else:
        probs = x.softmax(-1)
        if columns.min_p is not None:
            least = probs.amax(-1, keepdim=True) * columns.min_p.unsqueeze(1)
            probs = probs.masked_fill(probs < least, 0)
    tokens = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
    if ids is not None:
        tokens = ids.gather(1, tokens.unsqueeze(1))[:, 0]
    if columns.path == "mixed":
        tokens = torch.where(columns.temperature < 1e-5, logits.argmax(-1), tokens)
    return tokens
