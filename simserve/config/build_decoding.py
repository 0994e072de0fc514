"""From the keys of `decoding` to how requests become several."""

from __future__ import annotations

from simserve.config.decoding import BeamSearch, BestOf, Decoding, Parallel
from simserve.config.workload import Workload
from simserve.errors import ConfigError, Problem
from simserve.protocols import TokenOutcomes
from simserve.workload import ranked, siblings
from simserve.workload.beams import DrawnForks
from simserve.workload.groups import Method
from simserve.workload.ranked import Choice

__all__ = ["build_method"]


def build_method(
    config: Workload,
    seed: int,
    has_turns: bool,
    outcomes: TokenOutcomes | None,
    choices: list[Choice],
) -> Method:
    """How the requests of a workload are decoded, by their class.

    Args:
        config: the workload.
        seed: of all that is drawn.
        has_turns: whether requests wait for the answers of others.
        outcomes: what a model gives requests; None: who survives is drawn.
        choices: takes the sequences that are ranked best.

    Raises:
        ConfigError: turns quote answers that are chosen only later.
    """
    others, classes = config.decoding, config.synthetic.classes if config.synthetic else ()
    if has_turns and others is not None and not isinstance(others, Parallel):
        message = (
            f"{others.kind} does not go with turns that wait for each other (parent), because they "
            "quote answers that are known beforehand: use kind parallel, or a trace without"
        )
        raise ConfigError([Problem(path="workload.decoding.kind", message=message)])

    def decoded(decoding: Decoding) -> Method:
        if outcomes is not None and not isinstance(decoding, Parallel):
            return _ranked(decoding, outcomes, choices)
        return _drawn(decoding, seed)

    return siblings.ByClass(
        methods={one.name: decoded(one.decoding) for one in classes if one.decoding},
        others=decoded(others) if others else None,
    )


def _ranked(config: BeamSearch | BestOf, outcomes: TokenOutcomes, choices: list[Choice]) -> Method:
    options = config.model_dump(exclude={"kind", "fork_probability", "end_probability"})
    cls = ranked.RankedBeams if isinstance(config, BeamSearch) else ranked.BestOf
    method: Method = cls(**options, outcomes=outcomes, chosen=choices.append)
    return method


def _drawn(config: Decoding, seed: int) -> Method:
    if isinstance(config, BeamSearch):
        options = config.model_dump(exclude={"kind", "length_penalty", "eos_token_id"})
        return DrawnForks(**options, seed=seed)
    if isinstance(config, Parallel):
        return siblings.Parallel(**config.model_dump(exclude={"kind"}), seed=seed)
    return siblings.Parallel(n=config.best_of, seed=seed)
