"""Configuration of the scheduler, under vLLM's names. null means: the engine's own default."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from simserve.config.base import Count, Fraction, Natural, Registered, StrictModel

__all__ = ["Scheduler", "Speculative"]


class Speculative(StrictModel):
    """Speculative decoding with made-up drafts."""

    method: Literal["ngram", "eagle"]
    """How the engine treats drafts; eagle stands for eagle3 and mtp too."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)]
    """Draft tokens per request and step."""
    acceptance: Fraction
    """Probability that a draft token is accepted, given that those before it were."""


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
