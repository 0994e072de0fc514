"""Which keys of speculative decoding go with which executors."""

from __future__ import annotations

from simserve.config.executor import Real, RooflineCost
from simserve.config.model import RunConfig
from simserve.config.presets import load_model
from simserve.errors import Problem
from simserve.types import ModelShape

__all__ = ["speculative_problems"]


def speculative_problems(config: RunConfig, model: ModelShape) -> list[Problem]:
    """What has no effect, or is missing, where drafts are made up and where they are real."""
    speculative, executor = config.scheduler.speculative, config.executor
    if speculative is None:
        return []
    is_real = isinstance(executor, Real) and executor.tokens == "sampled"
    given = speculative.model_fields_set
    made_up = [key for key in ("acceptance", "acceptance_file") if getattr(speculative, key)]
    lookups = given & {"prompt_lookup_min", "prompt_lookup_max"}
    found: list[tuple[str, str]] = []
    if is_real:
        message = (
            "has no effect with executor.tokens sampled: the model says which drafts are right"
        )
        found += [(f".{key}", message) for key in sorted(given & {"acceptance", "acceptance_file"})]
        if speculative.method != "ngram":
            message = (
                f"{speculative.method} is only simulated, with made-up drafts: with "
                "executor.tokens sampled use ngram"
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
    if speculative.draft_model is not None:
        found += _of_draft_model(config, model, speculative.draft_model)
    if lookups and speculative.method != "ngram":
        message = f"belongs to method ngram, not to {speculative.method}"
        found += [(f".{key}", message) for key in sorted(lookups)]
    return [Problem(path=f"scheduler.speculative{key}", message=message) for key, message in found]


def _of_draft_model(config: RunConfig, model: ModelShape, name: str) -> list[tuple[str, str]]:
    draft, found = load_model(name), []
    if draft.vocab_size != model.vocab_size:
        message = (
            f"{name} has {draft.vocab_size} tokens, {model.name} has {model.vocab_size}: drafts "
            "must be tokens of the model"
        )
        found.append((".draft_model", message))
    executor = config.executor
    if not isinstance(executor, Real) and not isinstance(executor.cost, RooflineCost):
        message = (
            f"executor.cost kind {executor.cost.kind} is of one model and cannot price {name}: "
            "use roofline"
        )
        found.append((".draft_model", message))
    return found
