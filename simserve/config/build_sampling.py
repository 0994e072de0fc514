"""What a simulation's steps take longer because tokens are sampled, from the configuration."""

from __future__ import annotations

from simserve.config.executor import Simulated
from simserve.config.loader import LoadedConfig
from simserve.config.sampling_checks import unpriced
from simserve.config.trace_sampling import own_sampling
from simserve.cost.sampling import SamplingCost
from simserve.cost.sampling_file import load_sampling
from simserve.executor.real.choices import SamplingChoice, SamplingChoices

__all__ = ["sampling_cost"]

_INCLUDED = {"profile": "argmax", "roofline": "greedy"}
"""By kind of cost: a profile's engine took the likeliest token by torch, and the roofline's output
head ends with reading all logits once. The others have nothing of it."""


def sampling_cost(
    loaded: LoadedConfig, config: Simulated, seed: int
) -> tuple[SamplingCost | None, list[str]]:
    """The price of sampling, or None and why there is none.

    Raises:
        ConfigError, TraceError: as `own_sampling` has it.
    """
    own_sampling(loaded, eos_token_ids=None)  # refuses what cannot be
    if not_priced := unpriced(loaded.config, loaded.gpu):
        return None, [
            f"how requests want their tokens chosen is not priced: {one}" for one in not_priced
        ]
    choices = [SamplingChoice(one.weight, one.of_request) for one in config.sampling]
    cost = SamplingCost(
        load_sampling(loaded.gpu.name),
        loaded.model.vocab_size,
        SamplingChoices(choices, seed).of,
        included=_INCLUDED.get(config.cost.kind),
    )
    return cost, []
