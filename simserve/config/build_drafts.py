"""Who makes drafts up in a run, what that costs, and which slots it takes."""

from __future__ import annotations

from simserve.config.executor import Real, RooflineCost
from simserve.config.loader import LoadedConfig
from simserve.config.scheduler import Scheduler as SchedulerConfig
from simserve.cost.roofline import RooflineCost as RooflineCostModel
from simserve.executor.acceptance import Accepted, accepted_by_position, read_acceptance
from simserve.executor.draft_cost import DraftCost
from simserve.executor.drafts import MadeUpDrafter

__all__ = ["draft_cost", "drafter", "num_draft_tokens", "num_lookahead_tokens"]


def num_draft_tokens(config: SchedulerConfig) -> int:
    """k; 0 without speculative decoding."""
    return config.speculative.num_speculative_tokens if config.speculative else 0


def num_lookahead_tokens(config: SchedulerConfig) -> int:
    """Slots for what a drafter that is a model keeps of its own tokens."""
    is_ngram = config.speculative is not None and config.speculative.method == "ngram"
    return 0 if is_ngram else num_draft_tokens(config)


def drafter(loaded: LoadedConfig, seed: int) -> MadeUpDrafter | None:
    """Who makes drafts up; None: nobody, or drafts are real."""
    config, executor = loaded.config.scheduler, loaded.config.executor
    speculative = config.speculative
    if speculative is None or (isinstance(executor, Real) and executor.tokens == "sampled"):
        return None
    assert config.max_model_len is not None
    k = speculative.num_speculative_tokens
    return MadeUpDrafter(
        method=speculative.method,
        num_speculative_tokens=k,
        accepted=_accepted(loaded, seed),
        draft_len=lambda request_id, so_far: k,
        max_model_len=config.max_model_len,
    )


def draft_cost(loaded: LoadedConfig) -> DraftCost | None:
    """Time that drafting adds to simulated steps; of a draft model the GPU's alone.

    A profile is of one model: the other one is then priced by the roofline.
    """
    config, executor = loaded.config.scheduler.speculative, loaded.config.executor
    if config is None or isinstance(executor, Real):
        return None
    if loaded.draft is None:
        return DraftCost(config.draft_s) if config.draft_s else None
    cost = executor.cost
    roofline = cost if isinstance(cost, RooflineCost) else RooflineCost(kind="roofline")
    efficiencies = roofline.model_dump(exclude={"kind", "host_step_s", "host_request_s"})
    passes = RooflineCostModel(
        loaded.draft,
        loaded.gpu,
        kv_cache_dtype=loaded.config.kv_cache.dtype,
        host_step_s=0.0,
        host_request_s=0.0,
        **efficiencies,
    )
    return DraftCost(config.draft_s, passes, config.num_speculative_tokens)


def _accepted(loaded: LoadedConfig, seed: int) -> Accepted:
    speculative = loaded.config.scheduler.speculative
    assert speculative is not None
    k, acceptance = speculative.num_speculative_tokens, speculative.acceptance
    if speculative.acceptance_file is not None:
        with loaded.placing("scheduler.speculative.acceptance_file"):
            return read_acceptance(loaded.path(speculative.acceptance_file), k, seed)
    assert acceptance is not None
    each = acceptance if isinstance(acceptance, tuple) else (acceptance,) * k
    return accepted_by_position(each, seed)
