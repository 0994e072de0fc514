"""From a configuration to parts that run: the one place that knows concrete classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from simserve.config import kv_cache as kv_keys
from simserve.config.build_real import build_real, open_machine
from simserve.config.build_workload import BuiltWorkload, build_workload
from simserve.config.executor import (
    Cost,
    CustomCost,
    FormulaCost,
    ProfileCost,
    Real,
    RooflineCost,
    Simulated,
)
from simserve.config.loader import LoadedConfig
from simserve.config.presets import load_model
from simserve.config.scheduler import Scheduler as SchedulerConfig
from simserve.cost.sampling import SamplingCost
from simserve.cost.sampling_file import load_sampling
from simserve.engine.admission import Admission
from simserve.engine.inbox import Inbox
from simserve.engine.loop import EngineParts
from simserve.errors import ConfigError, Problem
from simserve.executor.acceptance import Accepted, accepted_by_position, read_acceptance
from simserve.executor.draft_cost import DraftCost
from simserve.executor.drafts import MadeUpDrafter
from simserve.executor.real.choices import SamplingChoice, SamplingChoices
from simserve.executor.simulated import SimulatedExecutor
from simserve.kv.capacity import fit_kv_cache
from simserve.kv.groups import FullAttention, Group, SlidingWindow
from simserve.metrics.recorder import RowSink, RunRecorder
from simserve.protocols import CostModel, Executor, KVCacheManager, Scheduler, TokenOutcomes
from simserve.registry import check_protocol, resolve
from simserve.sched.params import SchedulerParams
from simserve.sched.vllm_async import VllmAsyncScheduler

if TYPE_CHECKING:
    from simserve.executor.real.machine import Machine

__all__ = ["Built", "build", "with_pool_size"]

_SAMPLING_INCLUDED = {"profile": "argmax", "roofline": "greedy"}
"""By kind of cost: a profile's engine took the likeliest token by torch, and the roofline's output
head ends with reading all logits once. The others have nothing of it."""


@dataclass(slots=True, kw_only=True)
class Built:
    """A simulation ready to run, once."""

    parts: EngineParts
    recorder: RunRecorder
    workload: BuiltWorkload
    cost_model: CostModel | None
    """None: a real run without a shadow."""
    sampling: SamplingCost | None = None
    """Prices what steps take longer because tokens are sampled; None: nothing."""


def with_pool_size(loaded: LoadedConfig, machine: Machine | None = None) -> LoadedConfig:
    """Write out `kv_cache.num_gpu_blocks: auto`: what the machine has, or would be expected to.

    Raises:
        CapacityError: the weights leave no room, or max_model_len does not fit.
    """
    config = loaded.config
    if config.kv_cache.num_gpu_blocks != "auto":
        return loaded
    if machine is not None:
        return _with_num_gpu_blocks(loaded, machine.num_gpu_blocks)
    scheduler = config.scheduler
    assert scheduler.max_num_batched_tokens is not None
    assert scheduler.max_num_seqs is not None
    capacity = fit_kv_cache(
        loaded.model,
        loaded.gpu,
        kv_cache_dtype=config.kv_cache.dtype,
        block_size=config.kv_cache.block_size,
        gpu_memory_utilization=config.kv_cache.gpu_memory_utilization,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=scheduler.max_model_len,
    )
    return _with_num_gpu_blocks(loaded, capacity.num_gpu_blocks)


def _with_num_gpu_blocks(loaded: LoadedConfig, num_gpu_blocks: int) -> LoadedConfig:
    config = loaded.config
    kv_cache = config.kv_cache.model_copy(update={"num_gpu_blocks": num_gpu_blocks})
    return replace(loaded, config=config.model_copy(update={"kv_cache": kv_cache}))


def build(
    loaded: LoadedConfig,
    seed: int,
    *,
    leap: bool = True,
    machine: Machine | None = None,
    sink: RowSink | None = None,
    kv: KVCacheManager | None = None,
) -> Built:
    """Make everything that a run of `loaded` needs; `loaded` has its pool size written out.

    Args:
        loaded: the configuration.
        seed: of all that is drawn.
        leap: take runs of equal steps at once, where that can be.
        machine: what the steps of a real run are computed on; None: one is opened.
        sink: takes the rows of the tables; None: the recorder keeps them.
        kv: one that an earlier run has left, with what it has cached; None: a new one.

    Raises:
        ConfigError, TraceError, UnknownNameError, PluginError: as the parts have it.
    """
    config = loaded.config
    scheduler_config = config.scheduler
    max_model_len = scheduler_config.max_model_len
    assert max_model_len is not None
    kv = kv or _kv_manager(loaded)
    steps = _steps(loaded, seed, machine, _scheduler(scheduler_config, kv), sink)
    workload = build_workload(loaded, seed, steps.outcomes)
    recorder = RunRecorder(
        num_gpu_blocks=kv.num_gpu_blocks,
        block_size=kv.block_size,
        enable_prefix_caching=kv.enable_prefix_caching,
        sink=sink,
        shares_prefixes=workload.shares_prefixes,
    )
    parts = EngineParts(
        workload=workload.source,
        inbox=Inbox(workload.source),
        scheduler=steps.scheduler,
        kv=kv,
        executor=steps.executor,
        recorder=recorder,
        admission=_admission(scheduler_config, max_model_len, kv),
        max_model_len=max_model_len,
        leap=leap,
    )
    return Built(
        parts=parts,
        recorder=recorder,
        workload=workload,
        cost_model=steps.cost_model,
        sampling=steps.sampling,
    )


class _Steps(NamedTuple):
    """Who decides steps, who runs them, and what they are priced by."""

    scheduler: Scheduler
    executor: Executor
    cost_model: CostModel | None
    outcomes: TokenOutcomes | None = None
    sampling: SamplingCost | None = None


def _steps(
    loaded: LoadedConfig,
    seed: int,
    machine: Machine | None,
    scheduler: Scheduler,
    sink: RowSink | None,
) -> _Steps:
    config, drafter = loaded.config.executor, _drafter(loaded, seed)
    cost_model: CostModel | None
    if isinstance(config, Real):
        machine = machine or open_machine(loaded)
        cost_model = None if config.shadow is None else _cost_model(loaded, config.shadow.cost)
        scheduler, executor, outcomes = build_real(
            loaded, machine, scheduler, drafter, cost_model, sink.add_output if sink else None
        )
        return _Steps(scheduler, executor, cost_model, outcomes)
    cost_model = _cost_model(loaded, config.cost)
    if config.noise == "residual":
        cost_model = _with_residual_noise(cost_model, seed)
    sampling = _sampling(loaded, config, seed)
    simulated = SimulatedExecutor(cost_model, drafter, sampling, draft_cost=_draft_cost(loaded))
    return _Steps(scheduler, simulated, cost_model, sampling=sampling)


def _admission(config: SchedulerConfig, max_model_len: int, kv: KVCacheManager) -> Admission:
    return Admission(
        max_model_len,
        kv,
        config.on_impossible == "as_engine",
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_extra_slots=_num_draft_tokens(config) + _num_lookahead_tokens(config),
    )


def _scheduler(config: SchedulerConfig, kv: KVCacheManager) -> Scheduler:
    assert config.max_num_batched_tokens is not None
    assert config.max_num_seqs is not None
    assert config.max_model_len is not None
    params = SchedulerParams(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.policy,
        scheduler_reserve_full_isl=bool(config.scheduler_reserve_full_isl),
        num_lookahead_tokens=_num_lookahead_tokens(config),
        quirks=config.quirks,
        options=config.options,
    )
    if config.async_scheduling and config.kind != "vllm":
        raise ConfigError(f"scheduler.async_scheduling: kind vllm has it, not '{config.kind}'")
    if config.speculative is not None and config.kind != "vllm" and ":" not in config.kind:
        raise ConfigError(f"scheduler.speculative: kind vllm takes drafts, not '{config.kind}'")
    if config.scheduler_reserve_full_isl and config.kind != "vllm" and ":" not in config.kind:
        raise ConfigError(
            f"scheduler.scheduler_reserve_full_isl: kind vllm has it, not '{config.kind}'"
        )
    cls = VllmAsyncScheduler if config.async_scheduling else resolve("schedulers", config.kind)
    check_protocol(cls, "schedulers")
    scheduler: Scheduler = cls(params, kv)
    return scheduler


def _kv_manager(loaded: LoadedConfig) -> KVCacheManager:
    config, scheduler = loaded.config.kv_cache, loaded.config.scheduler
    cls = resolve("allocators", config.allocator)
    check_protocol(cls, "allocators")
    arguments: dict[str, Any] = {
        "num_gpu_blocks": config.num_gpu_blocks,
        "block_size": config.block_size,
        "max_model_len": scheduler.max_model_len,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    if config.allocator == "paged":
        arguments["groups"] = groups = _groups(loaded)
        # A window must outlast what a step appends, or blocks leave it before they are complete.
        least = _num_draft_tokens(scheduler) + 1 + scheduler.async_scheduling
        windows = [group.window for group in groups if isinstance(group, SlidingWindow)]
        if windows and min(windows) < least:
            message = f"a window of {min(windows)} is too short here: at least {least}"
            raise ConfigError([Problem(path="kv_cache.groups", message=message)])
        drafts = scheduler.speculative
        arguments["drop_last_hit"] = drafts is not None and drafts.method == "eagle"
        arguments["free_queue"] = resolve("evictions", config.eviction)
    kv: KVCacheManager = cls(**arguments)
    return kv


def _groups(loaded: LoadedConfig) -> list[Group]:
    groups = loaded.config.kv_cache.groups
    if groups is None:
        window = loaded.model.sliding_window
        return [FullAttention() if window is None else SlidingWindow(window)]
    return [
        SlidingWindow(group.window) if isinstance(group, kv_keys.SlidingWindow) else FullAttention()
        for group in groups
    ]


def _cost_model(loaded: LoadedConfig, config: Cost) -> CostModel:
    cls = resolve("cost_models", config.kind)
    check_protocol(cls, "cost_models")
    cost_model: CostModel
    if isinstance(config, FormulaCost):
        cost_model = cls(config.base_s, config.per_token_s, config.per_attended_token_s)
    elif isinstance(config, RooflineCost):
        cost_model = cls(
            loaded.model,
            loaded.gpu,
            kv_cache_dtype=loaded.config.kv_cache.dtype,
            **config.model_dump(exclude={"kind"}),
        )
    elif isinstance(config, ProfileCost):
        cost_model = cls(
            loaded.model,
            loaded.gpu,
            name=config.name,
            path=config.path,
            base_dir=loaded.base_dir,
            kv_cache_dtype=loaded.config.kv_cache.dtype,
            host_scale=config.host_scale,
            host=config.host,
        )
    else:
        assert isinstance(config, CustomCost)
        cost_model = cls(loaded.model, loaded.gpu, **config.options)
    return cost_model


def _with_residual_noise(cost_model: CostModel, seed: int) -> CostModel:
    from simserve.cost.noise import ResidualNoise
    from simserve.cost.profile import ProfileCost as ProfileCostModel

    assert isinstance(cost_model, ProfileCostModel)
    return ResidualNoise(cost_model, seed)


def _sampling(loaded: LoadedConfig, config: Simulated, seed: int) -> SamplingCost | None:
    if not config.sampling:
        return None
    choices = [SamplingChoice(one.weight, one.of_request) for one in config.sampling]
    return SamplingCost(
        load_sampling(loaded.gpu.name),
        loaded.model.vocab_size,
        SamplingChoices(choices, seed).of,
        included=_SAMPLING_INCLUDED.get(config.cost.kind),
        num_logprobs=max(
            (n for one in config.sampling if (n := one.logprobs) is not None), default=None
        ),
    )


def _num_draft_tokens(config: SchedulerConfig) -> int:
    return config.speculative.num_speculative_tokens if config.speculative else 0


def _num_lookahead_tokens(config: SchedulerConfig) -> int:
    """Slots for what a drafter that is a model keeps of its own tokens."""
    is_ngram = config.speculative is not None and config.speculative.method == "ngram"
    return 0 if is_ngram else _num_draft_tokens(config)


def _drafter(loaded: LoadedConfig, seed: int) -> MadeUpDrafter | None:
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


def _draft_cost(loaded: LoadedConfig) -> DraftCost | None:
    """Time that drafting adds to simulated steps. A draft model's steps are launched one after the
    other: the host waits for none of them."""
    config, executor = loaded.config.scheduler.speculative, loaded.config.executor
    if config is None or isinstance(executor, Real):
        return None
    if config.draft_model is None:
        return DraftCost(config.draft_s) if config.draft_s else None
    assert isinstance(executor.cost, RooflineCost)
    draft = replace(loaded, model=load_model(config.draft_model))
    alone = executor.cost.model_copy(update={"host_step_s": 0.0, "host_request_s": 0.0})
    return DraftCost(config.draft_s, _cost_model(draft, alone), config.num_speculative_tokens)


def _accepted(loaded: LoadedConfig, seed: int) -> Accepted:
    speculative = loaded.config.scheduler.speculative
    assert speculative is not None
    k, acceptance = speculative.num_speculative_tokens, speculative.acceptance
    if speculative.acceptance_file is not None:
        return read_acceptance(loaded.path(speculative.acceptance_file), k, seed)
    assert acceptance is not None
    each = acceptance if isinstance(acceptance, tuple) else (acceptance,) * k
    return accepted_by_position(each, seed)
