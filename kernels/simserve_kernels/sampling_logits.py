"""What changes logits before a token is chosen: masks and penalties, in plain torch on any device.

vLLM's order: allowed tokens, bad words, minimum length, bias, penalties.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["LogitRules", "apply_penalties", "apply_rules", "masked_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRules:
    """What one request wants done to its logits; the defaults leave them as they are.

    Raises:
        ValueError: a penalty that means nothing.
    """

    presence_penalty: float = 0.0
    """Taken from the logit of each token that was put out before."""
    frequency_penalty: float = 0.0
    """Taken from it for each time that it was."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or put out before."""
    min_tokens: int = 0
    """Before so many are put out, the tokens that end the request are masked."""
    stop_token_ids: Sequence[int] = ()
    """They end the request; the end of sequence is one of them if it does."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that are not put out: the last token of one is masked after the others."""
    allowed_token_ids: Sequence[int] | None = None
    """All others are masked."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens."""

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -2 <= value <= 2:
                raise ValueError(f"{name} is {value}: it must be from −2 to 2")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}: it must be above 0; 1 is none"
            )
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is {self.min_tokens}: it must be at least 0")


def masked_tokens(rules: LogitRules, output_ids: Sequence[int]) -> Iterator[int]:
    """Yield the tokens that bad words and the minimum length mask after these were put out."""
    for word in rules.bad_words:
        *before, last = word
        if list(output_ids[len(output_ids) - len(before) :]) == before:
            yield last
    if len(output_ids) < rules.min_tokens:
        yield from rules.stop_token_ids


def apply_rules(
    logits: torch.Tensor,
    rules: Sequence[LogitRules],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Return logits `[R, V]` as the rules of the R requests have them, in the dtype of `logits`.

    Args:
        logits: of the next tokens; left as they are.
        rules: of each request.
        prompts: token ids of each prompt.
        outputs: token ids that each request has put out.
    """
    out = logits.clone()
    for row, rule in enumerate(rules):
        if rule.allowed_token_ids is not None:
            forbidden = torch.ones(out.shape[1], dtype=torch.bool, device=out.device)
            forbidden[list(rule.allowed_token_ids)] = False
            out[row, forbidden] = -torch.inf
        out[row, list(masked_tokens(rule, outputs[row]))] = -torch.inf
        if rule.logit_bias:
            bias = torch.tensor(list(rule.logit_bias.values()), dtype=out.dtype, device=out.device)
            out[row, list(rule.logit_bias)] += bias
    return apply_penalties(
        out,
        _padded(prompts, out),
        _padded(outputs, out),
        *(
            torch.tensor([getattr(rule, name) for rule in rules], device=out.device)
            for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
        ),
    )


def apply_penalties(
    logits: torch.Tensor,
    prompt_ids: torch.Tensor,
    output_ids: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Return penalised logits. Nothing waits for the device.

    Args:
        logits: `[R, V]`.
        prompt_ids: int64 `[R, longest prompt]`; V pads it.
        output_ids: int64 `[R, longest output]`; V pads it.
        presence: `[R]`, taken from logits of tokens in the output.
        frequency: `[R]`, taken from them for each time.
        repetition: `[R]`, divides positive logits and multiplies negative ones of tokens in either.
    """
    shape = (logits.shape[0], logits.shape[1] + 1)
    counts = torch.zeros(shape, dtype=logits.dtype, device=logits.device)
    counts.scatter_add_(1, output_ids, torch.ones_like(output_ids, dtype=logits.dtype))
    counts = counts[:, :-1]
    prompted = torch.zeros(shape, dtype=torch.bool, device=logits.device)
    prompted = prompted.scatter_(1, prompt_ids, True)[:, :-1]
    presence, frequency, repetition = (
        one.to(logits.dtype).unsqueeze(1) for one in (presence, frequency, repetition)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    out = torch.where(prompted | (counts > 0), repeated, logits)
    return out - frequency * counts - presence * (counts > 0)


def _padded(ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    rows = [torch.tensor(list(one), dtype=torch.int64) for one in ids]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True, padding_value=logits.shape[1]).to(logits.device)
