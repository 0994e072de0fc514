"""The engine's defaults and checks: a configuration with everything written out.

Defaults are those of vLLM v0.11.0's API server on CUDA GPUs; the checks are those of its
scheduler configuration.
"""

from __future__ import annotations

from typing import NamedTuple

from simserve.config.decoding_checks import decoding_problems, decoding_remarks
from simserve.config.model import RunConfig
from simserve.config.remarks import remarks, unreachable
from simserve.config.sampling_checks import sampling_problems
from simserve.config.scheduler import Scheduler
from simserve.config.speculative_checks import speculative_problems
from simserve.config.workload import Workload
from simserve.errors import ConfigError, Problem
from simserve.types import GPU, ModelShape

__all__ = ["Resolution", "SchedulerLimits", "resolve", "scheduler_limits", "with_defaults"]

_DEFAULT_BUDGET = 2048
_DEFAULT_MAX_NUM_SEQS = 128
_DEFAULT_MAX_MODEL_LEN = 8192
_LARGE_GPU_GIB = 70
_LONG_PREFILL_SHARE = 0.04


class SchedulerLimits(NamedTuple):
    """What the scheduler goes by. All but the flag are numbers of tokens or requests."""

    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int
    chunked_prefill_enabled: bool
    max_num_partial_prefills: int
    max_long_partial_prefills: int


class Resolution(NamedTuple):
    """A configuration with every default written out, and what is to be said about it."""

    config: RunConfig
    warnings: tuple[str, ...]
    reachable_in_engine: bool
    """Whether an engine of this version can be started so on a common GPU."""


def scheduler_limits(
    *,
    max_model_len: int = _DEFAULT_MAX_MODEL_LEN,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int = _DEFAULT_MAX_NUM_SEQS,
    long_prefill_token_threshold: int = 0,
    enable_chunked_prefill: bool = True,
    max_num_partial_prefills: int = 1,
    max_long_partial_prefills: int = 1,
) -> SchedulerLimits:
    """The engine's bare scheduler configuration: its defaults and checks.

    A budget that is not given is 2048 tokens (without chunked prefill at least max_model_len), but
    not more than max_num_seqs requests of max_model_len. More than one partial prefill turns a
    threshold of 0 into 4 % of max_model_len; nothing else comes of it.

    Raises:
        ConfigError: every check that fails.
    """
    budget, threshold = max_num_batched_tokens, long_prefill_token_threshold
    if budget is None:
        least = _DEFAULT_BUDGET if enable_chunked_prefill else max(max_model_len, _DEFAULT_BUDGET)
        budget = min(least, max_num_seqs * max_model_len)
    if max_num_partial_prefills > 1 and threshold == 0:
        threshold = int(max_model_len * _LONG_PREFILL_SHARE)
    limits = SchedulerLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=threshold,
        chunked_prefill_enabled=enable_chunked_prefill,
        max_num_partial_prefills=max_num_partial_prefills,
        max_long_partial_prefills=max_long_partial_prefills,
    )
    if problems := _check(limits, max_model_len):
        raise ConfigError(problems)
    return limits


def _check(limits: SchedulerLimits, max_model_len: int) -> list[Problem]:
    budget, partial = limits.max_num_batched_tokens, limits.max_num_partial_prefills
    chunked, threshold = limits.chunked_prefill_enabled, limits.long_prefill_token_threshold
    checks = (
        (
            "max_num_batched_tokens",
            budget >= limits.max_num_seqs,
            f"must be at least max_num_seqs ({limits.max_num_seqs}), not {budget}",
        ),
        (
            "max_num_batched_tokens",
            chunked or budget >= max_model_len,
            f"must be at least max_model_len ({max_model_len}) with chunked prefill off, "
            f"not {budget}: a longer prompt could never start",
        ),
        ("max_num_partial_prefills", partial >= 1, f"must be at least 1, not {partial}"),
        (
            "max_num_partial_prefills",
            chunked or partial <= 1,
            f"must be 1 with chunked prefill off, not {partial}",
        ),
        (
            "long_prefill_token_threshold",
            partial <= 1 or threshold <= max_model_len,
            f"must be at most max_model_len ({max_model_len}) with several partial prefills, "
            f"not {threshold}",
        ),
        (
            "max_long_partial_prefills",
            1 <= limits.max_long_partial_prefills <= partial,
            f"must be from 1 to max_num_partial_prefills ({partial}), "
            f"not {limits.max_long_partial_prefills}",
        ),
    )
    return [
        Problem(path=f"scheduler.{key}", message=message)
        for key, holds, message in checks
        if not holds
    ]


def resolve(
    config: RunConfig, model: ModelShape, gpu: GPU, draft: ModelShape | None = None
) -> Resolution:
    """Write out every default that depends on the model, the GPU or another key.

    `kv_cache.num_gpu_blocks: auto` stays: it takes the memory plan, which is not made here.

    Raises:
        ConfigError: values that do not go together.
    """
    problems = decoding_problems(config, model) + sampling_problems(config, model, gpu)
    if problems := problems + speculative_problems(config, model, draft):
        raise ConfigError(problems)
    scheduler = with_defaults(config.scheduler, model, gpu)
    limits = _limits_of(scheduler)
    resolved = scheduler.model_copy(
        update={"long_prefill_token_threshold": limits.long_prefill_token_threshold}
    )
    return Resolution(
        config.model_copy(update={"scheduler": resolved, "workload": _with_total(config)}),
        warnings=(*remarks(resolved, config.kv_cache, model), *decoding_remarks(config)),
        reachable_in_engine=not unreachable(resolved, config.kv_cache, model),
    )


def with_defaults(scheduler: Scheduler, model: ModelShape, gpu: GPU) -> Scheduler:
    """Write out what the engine decides by model and GPU where nothing is given."""
    is_large = gpu.memory_gib >= _LARGE_GPU_GIB and "a100" not in gpu.name.lower()
    max_model_len = scheduler.max_model_len or model.max_position_embeddings
    budget = scheduler.max_num_batched_tokens
    if budget is None and scheduler.enable_chunked_prefill:
        budget = 8192 if is_large else 2048
    elif budget is None:
        budget = max_model_len
    max_num_seqs = scheduler.max_num_seqs or min(1024 if is_large else 256, budget)
    reserves_all = scheduler.scheduler_reserve_full_isl
    if reserves_all is None:
        reserves_all = scheduler.kind == "vllm" and scheduler.compat == "0.20.2"
    return scheduler.model_copy(
        update={
            "max_model_len": max_model_len,
            "max_num_batched_tokens": budget,
            "max_num_seqs": max_num_seqs,
            "scheduler_reserve_full_isl": reserves_all,
        }
    )


def _limits_of(scheduler: Scheduler) -> SchedulerLimits:
    assert scheduler.max_model_len is not None  # written out before
    assert scheduler.max_num_seqs is not None
    return scheduler_limits(
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        max_num_partial_prefills=scheduler.max_num_partial_prefills,
        max_long_partial_prefills=scheduler.max_long_partial_prefills,
    )


def _with_total(config: RunConfig) -> Workload:
    synthetic = config.workload.synthetic
    if synthetic is None or synthetic.total is None:
        return config.workload
    counted = synthetic.model_copy(update={"num_requests": synthetic.total})
    return config.workload.model_copy(update={"synthetic": counted})
