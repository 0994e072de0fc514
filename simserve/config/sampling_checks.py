"""Which ways to choose tokens go with which executors and models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from simserve.config.decoding import BeamSearch
from simserve.config.executor import Executor, OwnSampling, Real, Sampling
from simserve.config.model import RunConfig
from simserve.errors import Problem
from simserve.sampling import RequestSampling
from simserve.types import GPU, ModelShape

__all__ = [
    "NO_PENALTIES_WITH_DRAFTS",
    "OF_CHOSEN_TOKENS",
    "PENALTIES",
    "contradictions",
    "no_token_left",
    "sampling_problems",
    "unpriced",
]

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


_MASKS = ("allowed_token_ids", "bad_words", "stop_token_ids", "ignore_eos", "min_tokens")
"""What tokens are forbidden by, or ends are."""

OF_BEAMS = {"weight", "temperature", "seed"}
"""What may be said of requests that become beams, whose drawn tokens nobody uses."""
NO_EFFECT_ON_BEAMS = "has no effect with beam_search, which ranks what the model finds likely"


class _Place(NamedTuple):
    """A key that says how tokens are chosen, and of whom."""

    path: str
    sampling: OwnSampling
    only_beams: bool
    """Whether all of its requests become beams."""
    shortest: int | None
    """Tokens of the shortest output of its requests that take its `min_tokens`, if it is known."""


def sampling_problems(config: RunConfig, model: ModelShape, gpu: GPU) -> list[Problem]:
    """Settings without effect, tokens that the model has not, and costs that are not known."""
    executor = config.executor
    is_real = isinstance(executor, Real)
    problems = [
        Problem(path=f"{place.path}.{key}", message=message)
        for place in _places(config)
        for key, message in (
            *(_without_effect(place.sampling) if _replays(config) else ()),
            *(_with_drafts(place.sampling) if is_real and config.scheduler.speculative else ()),
            *_unknown_tokens(place.sampling, model),
            *_of_beams(place),
            *_too_many(place, executor),
        )
    ]
    problems += contradictions(config, model)
    if executor.sampling and not is_real:
        message_of = unpriced(config, gpu)
        problems += [Problem(path="executor.sampling", message=one) for one in message_of]
    return problems


def _places(config: RunConfig) -> Iterator[_Place]:
    workload = config.workload
    synthetic, decoding = workload.synthetic, workload.decoding
    classes = synthetic.classes if synthetic is not None else ()
    decodings = [one.decoding or decoding for one in classes] or [decoding]
    beams = [isinstance(one, BeamSearch) for one in decodings]
    lengths: list[int] = []
    if synthetic is not None:
        outputs = [one.output_len or synthetic.output_len for one in classes]
        lengths = [one.least for one in outputs or [synthetic.output_len]]
    own = [one.sampling for one in classes]
    taking = [
        length
        for length, one in zip(lengths, own or [None], strict=bool(lengths))
        if one is None or "min_tokens" not in one.model_fields_set
    ]
    for i, entry in enumerate(config.executor.sampling):
        yield _Place(f"executor.sampling.{i}", entry, all(beams), min(taking, default=None))
    for i, sampling in enumerate(own):
        if sampling is not None:
            path = f"workload.synthetic.classes.{i}.sampling"
            yield _Place(path, sampling, beams[i], lengths[i])


def _replays(config: RunConfig) -> bool:
    return isinstance(config.executor, Real) and config.executor.tokens == "replay"


def _of_beams(place: _Place) -> list[tuple[str, str]]:
    given = place.sampling.model_fields_set - OF_BEAMS if place.only_beams else set()
    return [(key, NO_EFFECT_ON_BEAMS) for key in sorted(given)]


def _too_many(place: _Place, executor: Executor) -> list[tuple[str, str]]:
    """Numbers beyond what there is room for."""
    one, found = place.sampling, []
    if place.shortest is not None and one.min_tokens > place.shortest:
        message = (
            f"{one.min_tokens} is more than the {place.shortest} tokens of the shortest output"
        )
        found.append(("min_tokens", message))
    most = executor.max_logprobs if isinstance(executor, Real) else None
    if most is not None and one.logprobs is not None and one.logprobs > most:
        found.append(("logprobs", f"{one.logprobs} is more than executor.max_logprobs ({most})"))
    return found


def contradictions(
    config: RunConfig, model: ModelShape, eos_token_ids: Sequence[int] = ()
) -> Iterator[Problem]:
    """Entries, and what classes say over entries, that leave no token to choose from.

    Args:
        config: what says so.
        model: whose tokens.
        eos_token_ids: those with which it ends a sequence, if they are known.
    """
    entries = config.executor.sampling
    asked = [
        *((f"executor.sampling.{i}", one, ()) for i, one in enumerate(entries)),
        *((f"workload.{key}", one, entries) for key, one in config.workload.samplings.items()),
    ]
    for path, one, over in asked:
        own = {key: value for key, value in one.given.items() if key != "weight"}
        if found := no_token_left(own, over, model.vocab_size, eos_token_ids):
            yield Problem(path=f"{path}.{found[0]}", message=found[1])


def no_token_left(
    own: Mapping[str, Any],
    entries: Sequence[Sampling],
    vocab_size: int,
    eos_token_ids: Iterable[int],
) -> tuple[str, str] | None:
    """A setting that leaves no token to choose from, alone or over that of an entry, and why.

    Args:
        own: what a request, a class or an entry says itself: names the key.
        entries: what it is said over.
        vocab_size: tokens of the model.
        eos_token_ids: those with which it ends a sequence.
    """
    alone = RequestSampling(**own).contradiction(vocab_size, eos_token_ids)
    if alone is not None:
        return alone
    for i, entry in enumerate(entries):
        base = entry.of_request
        found = replace(base, **own).contradiction(vocab_size, eos_token_ids)
        if found is not None and base.contradiction(vocab_size, eos_token_ids) is None:
            name, why = found
            key = next(one for one in (name, *_MASKS) if one in own)
            return key, f"with executor.sampling.{i}, {name}: {why}"
    return None


def unpriced(config: RunConfig, gpu: GPU) -> list[str]:
    """Why what the choice of tokens costs is not known."""
    from simserve.cost.sampling_file import sampling_gpus

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
