"""Configuration of the scheduler, under vLLM's names. null means: the engine's own default."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from simserve.config.base import (
    Count,
    Fraction,
    Natural,
    Registered,
    Seconds,
    StrictModel,
)
from simserve.config.model_spec import ModelSpec

__all__ = ["Scheduler", "Speculative"]


class Speculative(StrictModel):
    """Speculative decoding: made-up drafts, or real ones where a real executor samples tokens."""

    method: Literal["ngram", "eagle", "draft_model"]
    """Who drafts, and so how the engine treats drafts; eagle stands for eagle3 and mtp too."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)]
    """Draft tokens per request and step."""
    acceptance: Fraction | Annotated[tuple[Fraction, ...], Field(strict=False)] | None = None
    """Made-up drafts: probability that a draft token is accepted, given that those before it were;
    one number, or one for each position."""
    acceptance_file: Annotated[str, Field(min_length=1)] | None = None
    """Instead: a JSON file with what a run has accepted, relative to this configuration file."""
    draft_model: ModelSpec | None = None
    """Of method draft_model: a model with the same vocabulary, named as `model` is."""
    draft_s: Seconds = 0.0
    """Simulated: time that a step with drafting takes longer (seconds)."""
    prompt_lookup_max: Count | None = None
    """Real drafts of method ngram: longest end of a sequence that is looked up earlier in it.
    null: as prompt_lookup_min, or 5."""
    prompt_lookup_min: Count | None = None
    """The shortest. null: as prompt_lookup_max, or 5."""

    @property
    def lookup(self) -> tuple[int, int]:
        """prompt_lookup_min and prompt_lookup_max, written out as vLLM does."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or 5, most or least or 5

    @model_validator(mode="after")
    def _fits(self) -> Self:
        k = self.num_speculative_tokens
        if (self.method == "draft_model") != (self.draft_model is not None):
            raise ValueError("method draft_model and the key draft_model need each other")
        if self.acceptance is not None and self.acceptance_file is not None:
            raise ValueError("acceptance and acceptance_file say the same twice: give one of them")
        if isinstance(self.acceptance, tuple) and len(self.acceptance) != k:
            raise ValueError(
                f"acceptance has {len(self.acceptance)} numbers: it must have one for each of the "
                f"{k} draft tokens"
            )
        if self.lookup[0] > self.lookup[1]:
            raise ValueError("prompt_lookup_min must be at most prompt_lookup_max")
        return self


class Scheduler(StrictModel):
    """Who decides what runs in each step."""

    kind: Annotated[str, Registered("schedulers")] = "vllm"
    """vllm, fcfs_static, prefill_first, sarathi, sjf, or a class of your own as 'module:Class'."""
    compat: Literal["0.11.0", "0.20.2"] = "0.11.0"
    """Version of vLLM whose decisions are reproduced. 0.20.2 is 0.11.0 with
    scheduler_reserve_full_isl; defaults of other keys are those of 0.11.0."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the waiting queue."""
    max_num_batched_tokens: Count | None = None
    """Token budget of a step. null: 8192 on GPUs of 70 GiB and more (but A100), else 2048;
    max_model_len with chunked prefill off."""
    max_num_seqs: Count | None = None
    """Most requests on the running list. null: 1024 on GPUs of 70 GiB and more (but A100),
    else 256; at most max_num_batched_tokens."""
    long_prefill_token_threshold: Natural = 0
    """Most tokens of one request in a step; 0 is off."""
    scheduler_reserve_full_isl: bool | None = None
    """Whether a request is admitted only if all its tokens, not just its next chunk, would find
    blocks. null: as `compat` has it (kind vllm: on since 0.20.2)."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed in several steps."""
    max_model_len: Count | None = None
    """Most tokens (prompt and output) of a request. null: the model's."""
    async_scheduling: bool = False
    """Plan a step while the one before still runs."""
    max_num_partial_prefills: Count = 1
    """Only effect: more than 1 turns a threshold of 0 into 4 % of max_model_len."""
    max_long_partial_prefills: Count = 1
    """No effect in this version of the engine; checked as it checks it."""
    quirks: Literal["as_engine", "fixed"] = "as_engine"
    """Whether oddities of the engine that look like bugs are reproduced."""
    on_impossible: Literal["reject", "as_engine"] = "reject"
    """A request that can never fit: reject and count it, or let it block as in the engine."""
    speculative: Speculative | None = None
    """Speculative decoding. null: off."""
    options: dict[str, JsonValue] = {}
    """Further arguments of a scheduler other than vllm, for example of a class of your own."""

    @model_validator(mode="after")
    def _async(self) -> Self:
        if self.async_scheduling and self.speculative is not None:
            raise ValueError("async_scheduling does not go with speculative decoding")
        return self
