"""What the requests of a workload say themselves of how their tokens are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from simserve.config.build_workload import trace_of
from simserve.config.decoding import BeamSearch
from simserve.config.executor import Real
from simserve.config.loader import LoadedConfig
from simserve.config.sampling_checks import (
    NO_EFFECT_ON_BEAMS,
    NO_PENALTIES_WITH_DRAFTS,
    OF_BEAMS,
    OF_CHOSEN_TOKENS,
    PENALTIES,
    no_token_left,
)
from simserve.errors import TraceError
from simserve.sampling import RequestSampling

if TYPE_CHECKING:
    from simserve.workload.trace import Trace

__all__ = ["own_sampling"]


def own_sampling(
    loaded: LoadedConfig, eos_token_ids: tuple[int, ...] | None
) -> tuple[Mapping[str, Any], ...]:
    """The settings that requests or their classes give, each once. Reads the whole trace.

    Args:
        loaded: the configuration.
        eos_token_ids: tokens with which the model ends a sequence; None: that does not matter.

    Raises:
        ConfigError, TraceError: as the trace has it.
        TraceError: a request wants what the model has not, or what has no effect.
    """
    workload = loaded.config.workload
    found: list[Mapping[str, Any]] = [one.given for one in workload.samplings.values()]
    if workload.trace is not None:
        found += _of_requests(loaded, trace_of(loaded, workload.trace), eos_token_ids)
    # Seeds alone make no difference to what a machine has to be made for.
    kinds = [{name: one[name] for name in one if name != "seed"} for one in found]
    return tuple({repr(one): one for one in kinds}.values())


def _of_requests(
    loaded: LoadedConfig, trace: Trace, eos_token_ids: tuple[int, ...] | None
) -> Iterable[Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for number, request in trace.numbered() if trace.features.names_sampling else ():
        asked = request.sampling
        if asked and repr(asked) not in found:
            if fault := _fault(asked, loaded, eos_token_ids):
                raise TraceError(f"{trace.path}:{number}: sampling.{fault}")
            found[repr(asked)] = asked
    return found.values()


def _fault(
    asked: Mapping[str, Any], loaded: LoadedConfig, eos_token_ids: tuple[int, ...] | None
) -> str | None:
    """The first thing that is wrong with what one request wants, and its name."""
    config, model = loaded.config, loaded.model
    if isinstance(config.executor, Real) and config.executor.tokens == "replay":
        for name in sorted(asked.keys() & OF_CHOSEN_TOKENS):
            return (
                f"{name}: has no effect with executor.tokens replay, where the trace dictates the "
                "tokens: use sampled"
            )
    if isinstance(config.executor, Real) and config.scheduler.speculative is not None:
        for name in PENALTIES:
            if name in asked:
                return f"{name}: {NO_PENALTIES_WITH_DRAFTS}"
    if isinstance(config.workload.decoding, BeamSearch):
        for name in sorted(asked.keys() - OF_BEAMS):
            return f"{name}: {NO_EFFECT_ON_BEAMS}"
    if asked.get("ignore_eos") is False and eos_token_ids == ():
        return f"ignore_eos: {model.name} names no eos_token_id: give it as one of stop_token_ids"
    settings = RequestSampling(**asked)
    for name, tokens in settings.named_tokens.items():
        largest = max(tokens, default=-1)
        if largest >= model.vocab_size:
            return f"{name}: {largest} is no token of {model.name}, which has {model.vocab_size}"
    entries, ends = config.executor.sampling, eos_token_ids or ()
    if found := no_token_left(asked, entries, model.vocab_size, ends):
        return ": ".join(found)
    if (asked.get("logprobs") or 0) > model.vocab_size:
        return f"logprobs: is more than the {model.vocab_size} tokens of {model.name}"
    return None
