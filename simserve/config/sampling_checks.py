"""Which ways to choose tokens go with which executors and models."""

from __future__ import annotations

from simserve.config.executor import OwnSampling, Real, Sampling
from simserve.config.model import RunConfig
from simserve.cost.sampling_file import sampling_gpus
from simserve.errors import Problem
from simserve.types import GPU, ModelShape

__all__ = ["NO_PENALTIES_WITH_DRAFTS", "OF_CHOSEN_TOKENS", "PENALTIES", "sampling_problems"]

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
NO_PENALTIES_WITH_DRAFTS = (
    "does not go with scheduler.speculative: the tokens of a step are not counted one after the "
    "other"
)
OF_CHOSEN_TOKENS = {
    *PENALTIES,
    "bad_words",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
}
"""What means something only where the model's tokens are the request's."""


def sampling_problems(config: RunConfig, model: ModelShape, gpu: GPU) -> list[Problem]:
    """Settings without effect where tokens are dictated, tokens that the model has not, and costs
    that are not known."""
    executor = config.executor
    if not isinstance(executor, Real):
        return _simulated_problems(config, executor.sampling, model, gpu)
    entries = {f"executor.sampling.{i}": one for i, one in enumerate(executor.sampling)}
    classes = {f"workload.{key}": one for key, one in config.workload.samplings.items()}
    return [
        Problem(path=f"{path}.{key}", message=message)
        for path, one in {**entries, **classes}.items()
        for key, message in (
            *(_without_effect(one) if executor.tokens == "replay" else ()),
            *(_with_drafts(one) if config.scheduler.speculative is not None else ()),
            *_unknown_tokens(one, model),
        )
    ]


def _simulated_problems(
    config: RunConfig, entries: list[Sampling], model: ModelShape, gpu: GPU
) -> list[Problem]:
    """What was not measured, and tokens that the model has not."""
    found = [
        (f"executor.sampling.{i}.{key}", message)
        for i, one in enumerate(entries)
        for key, message in _unknown_tokens(one, model)
    ]
    if entries:
        found += [("executor.sampling", message) for message in _unpriced(config, gpu)]
    return [Problem(path=path, message=message) for path, message in found]


def _unpriced(config: RunConfig, gpu: GPU) -> list[str]:
    """Why what the choice of tokens costs is not known."""
    found, known = [], sampling_gpus()
    if gpu.name not in known:
        found.append(
            f"what it costs was not measured on gpu {gpu.name}; it was on "
            f"{', '.join(known) or 'none'}"
        )
    if config.scheduler.speculative is not None:
        found.append("what it costs to verify drafts (scheduler.speculative) was not measured")
    return found


def _without_effect(one: OwnSampling) -> list[tuple[str, str]]:
    message = (
        "has no effect with executor.tokens replay, where the trace dictates the tokens: "
        "use tokens sampled"
    )
    return [(key, message) for key in sorted(one.model_fields_set & OF_CHOSEN_TOKENS)]


def _with_drafts(one: OwnSampling) -> list[tuple[str, str]]:
    return [(name, NO_PENALTIES_WITH_DRAFTS) for name in PENALTIES if name in one.model_fields_set]


def _unknown_tokens(one: OwnSampling, model: ModelShape) -> list[tuple[str, str]]:
    vocab_size = model.vocab_size
    problems = []
    if one.logprobs is not None and one.logprobs > vocab_size:
        problems.append(("logprobs", f"is more than the {vocab_size} tokens of {model.name}"))
    for key, tokens in one.of_request.named_tokens.items():
        largest = max(tokens, default=-1)
        if largest >= vocab_size:
            message = f"{largest} is no token of {model.name}, which has {vocab_size}"
            problems.append((key, message))
    return problems
