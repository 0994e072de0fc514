"""Which ways to decode go with which executors and schedulers."""

from __future__ import annotations

from collections.abc import Iterator

from simserve.config.decoding import BeamSearch, BestOf, Parallel
from simserve.config.executor import Real
from simserve.config.model import RunConfig
from simserve.errors import Problem
from simserve.types import ModelShape

__all__ = ["decoding_problems", "decoding_remarks"]


def decoding_problems(config: RunConfig, model: ModelShape) -> list[Problem]:
    """What cannot be simulated, or cannot be at all."""
    executor, synthetic = config.executor, config.workload.synthetic
    has_logprobs = isinstance(executor, Real) and executor.tokens == "sampled"
    has_turns = synthetic is not None and synthetic.sessions is not None
    return [
        Problem(path=f"workload.{path}.{key}", message=message)
        for path, decoding in config.workload.decodings.items()
        if not isinstance(decoding, Parallel)
        for key, message in (
            *(_with_turns(decoding) if has_turns else ()),
            *(_of_tokens(decoding, model) if has_logprobs else _without_tokens(decoding)),
        )
    ]


def _with_turns(decoding: BeamSearch | BestOf) -> Iterator[tuple[str, str]]:
    yield (
        "kind",
        f"{decoding.kind} does not go with sessions, whose turns quote answers that are known "
        "beforehand: use kind parallel, or single requests",
    )


def _without_tokens(decoding: BeamSearch | BestOf) -> Iterator[tuple[str, str]]:
    """What nothing can be made of where the model chooses no tokens."""
    needs = "executor.kind real with executor.tokens sampled"
    if isinstance(decoding, BestOf):
        yield (
            "kind",
            "best_of ranks sequences by their log-probabilities, which nothing has here: it needs "
            f"{needs}; kind parallel is the same load",
        )
        return
    defaults = BeamSearch(kind="beam_search", beam_width=1)
    for key in ("eos_token_id", "length_penalty"):
        if getattr(decoding, key) != getattr(defaults, key):
            yield key, f"has no effect where no tokens are chosen: it needs {needs}"


def _of_tokens(decoding: BeamSearch | BestOf, model: ModelShape) -> Iterator[tuple[str, str]]:
    """What is beyond the model's vocabulary."""
    if isinstance(decoding, BestOf):
        return
    there = f"{model.name} has {model.vocab_size} tokens"
    if 2 * decoding.beam_width > model.vocab_size:
        yield (
            "beam_width",
            f"{2 * decoding.beam_width} continuations of a beam are ranked, but {there}",
        )
    if decoding.eos_token_id is not None and decoding.eos_token_id >= model.vocab_size:
        yield "eos_token_id", f"{decoding.eos_token_id} is no token: {there}"


def decoding_remarks(config: RunConfig) -> list[str]:
    """What is valid and may not be meant."""
    several = [
        (f"workload.{key}", decoding)
        for key, decoding in config.workload.decodings.items()
        if not (isinstance(decoding, Parallel) and decoding.n == 1)
    ]
    found = []
    if config.scheduler.policy == "priority" and config.scheduler.compat == "0.11.0":
        found += [
            f"{key}: under policy priority vLLM v0.11.0 ends with an error when two waiting "
            "requests have the same priority and arrival, as those of one prompt have; here they "
            "keep their order"
            for key, _ in several
        ]
    executor = config.executor
    if isinstance(executor, Real) and executor.tokens == "sampled":
        is_greedy = all(one.temperature == 0 for one in executor.sampling)
        found += [
            f"{key}: all sequences of a request are the same, because executor.sampling takes the "
            "likeliest token each time"
            for key, decoding in several
            if is_greedy and not isinstance(decoding, BeamSearch)
        ]
    return found
