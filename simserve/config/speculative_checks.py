"""Which keys of speculative decoding go with which executors."""

from __future__ import annotations

from collections.abc import Iterator

from simserve.config.executor import ProfileCost, Real, RooflineCost
from simserve.config.model import RunConfig
from simserve.errors import Problem
from simserve.types import ModelShape

__all__ = ["speculative_problems"]


def speculative_problems(
    config: RunConfig, model: ModelShape, draft: ModelShape | None
) -> list[Problem]:
    """What has no effect, or is missing, where drafts are made up and where they are real."""
    speculative, executor = config.scheduler.speculative, config.executor
    is_real = isinstance(executor, Real) and executor.tokens == "sampled"
    has_weights = isinstance(executor, Real) and executor.draft_weights != "random"
    if has_weights and not (is_real and draft):
        message = "has no effect: no draft model is computed"
        return [Problem(path="executor.draft_weights", message=message)]
    if speculative is None:
        return []
    # Defaults that are written out, as in a run's config.yaml, are not given.
    fields = type(speculative).model_fields
    given = {name for name, value in speculative if value != fields[name].default}
    made_up = [key for key in ("acceptance", "acceptance_file") if getattr(speculative, key)]
    lookups = given & {"prompt_lookup_min", "prompt_lookup_max"}
    found: list[tuple[str, str]] = []
    if is_real:
        message = (
            "has no effect with executor.tokens sampled: the model says which drafts are right"
        )
        found += [(f".{key}", message) for key in sorted(given & {"acceptance", "acceptance_file"})]
        if speculative.method == "eagle":
            message = (
                "eagle is only simulated, with made-up drafts: with executor.tokens sampled use "
                "ngram or draft_model"
            )
            found.append((".method", message))
    elif not made_up and speculative.acceptance is None:
        message = (
            "drafts are made up here: give acceptance or acceptance_file (only executor.kind real "
            "with executor.tokens sampled verifies real ones)"
        )
        found.append(("", message))
    if isinstance(executor, Real) and "draft_s" in given:
        found.append((".draft_s", "has no effect with a real executor: it is measured"))
    if draft is not None:
        found += [(".draft_model", message) for message in _of_draft_model(config, model, draft)]
        if is_real:
            messages = _of_computed_draft_model(config, model, draft)
            found += [(".draft_model", message) for message in messages]
    if lookups and speculative.method != "ngram":
        message = f"belongs to method ngram, not to {speculative.method}"
        found += [(f".{key}", message) for key in sorted(lookups)]
    return [Problem(path=f"scheduler.speculative{key}", message=message) for key, message in found]


def _of_draft_model(config: RunConfig, model: ModelShape, draft: ModelShape) -> Iterator[str]:
    if draft.vocab_size != model.vocab_size:
        yield (
            f"{draft.name} has {draft.vocab_size} tokens, {model.name} has {model.vocab_size}: "
            "drafts must be tokens of the model"
        )
    cost = config.executor.cost
    if not isinstance(cost, RooflineCost | ProfileCost):
        yield (
            f"executor.cost kind {cost.kind} is of one model and cannot price {draft.name}: use "
            "roofline, or profile"
        )


def _of_computed_draft_model(
    config: RunConfig, model: ModelShape, draft: ModelShape
) -> Iterator[str]:
    """It reads the model's block tables, and needs to know all positions."""
    longest = config.scheduler.max_model_len or model.max_position_embeddings
    if longest > draft.max_position_embeddings:
        yield (
            f"{draft.name} knows {draft.max_position_embeddings} positions, fewer than "
            f"scheduler.max_model_len ({longest}): lower that"
        )
    window = model.sliding_window
    if window is not None and (draft.sliding_window or longest) > window:
        yield (
            f"{draft.name} looks further back than {window} tokens, and {model.name} gives back "
            "the blocks of older ones"
        )
