"""Which ways to decode go with which executors and schedulers."""

from __future__ import annotations

from simserve.config.decoding import BeamSearch, BestOf, Parallel
from simserve.config.executor import Real
from simserve.config.model import RunConfig
from simserve.errors import Problem

__all__ = ["decoding_problems", "decoding_remarks"]


def decoding_problems(config: RunConfig) -> list[Problem]:
    """What cannot be simulated, or cannot be at all."""
    executor, synthetic = config.executor, config.workload.synthetic
    has_logprobs = isinstance(executor, Real) and executor.tokens == "sampled"
    has_turns = synthetic is not None and synthetic.sessions is not None
    checks = (
        (
            (BestOf,),
            not has_logprobs,
            "ranks sequences by their log-probabilities, which nothing has here: it needs "
            "executor.kind real with executor.tokens sampled; kind parallel is the same load",
        ),
        (
            (BeamSearch, BestOf),
            has_turns,
            "does not go with sessions, whose turns quote answers that are known beforehand: use "
            "kind parallel, or single requests",
        ),
    )
    return [
        Problem(path=f"workload.{key}.kind", message=f"{decoding.kind} {message}")
        for key, decoding in config.workload.decodings.items()
        for kinds, fails, message in checks
        if fails and isinstance(decoding, kinds)
    ]


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
