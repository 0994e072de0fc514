"""From a configuration to parts that run: the one place that knows concrete classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from simserve.config import kv_cache as kv_keys
from simserve.config.build_cost import build_cost_model, with_residual_noise
from simserve.config.build_drafts import (
    draft_cost,
    drafter,
    num_draft_tokens,
    num_lookahead_tokens,
)
from simserve.config.build_workload import BuiltWorkload, build_workload
from simserve.config.executor import Cost, ProfileCost, Real, Simulated
from simserve.config.loader import LoadedConfig, placed
from simserve.config.scheduler import Scheduler as SchedulerConfig
from simserve.engine.admission import Admission
from simserve.engine.inbox import Inbox
from simserve.engine.loop import EngineParts
from simserve.errors import ConfigError, Problem
from simserve.executor.simulated import SimulatedExecutor
from simserve.kv.capacity import fit_kv_cache
from simserve.kv.groups import FullAttention, Group, SlidingWindow
from simserve.metrics.recorder import RowSink, RunRecorder
from simserve.protocols import CostModel, Executor, KVCacheManager, Scheduler, TokenOutcomes
from simserve.registry import check_protocol, is_builtin, resolve
from simserve.sched.checked import checked, promises_itself
from simserve.sched.params import SchedulerParams
from simserve.sched.vllm_async import VllmAsyncScheduler

if TYPE_CHECKING:
    from simserve.cost.sampling import SamplingCost
    from simserve.executor.real.machine import Machine

__all__ = ["Built", "build", "with_pool_size"]


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
    warnings: tuple[str, ...] = ()
    """What requests ask for and steps do not have."""


@placed
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
        draft=loaded.draft,
    )
    return _with_num_gpu_blocks(loaded, capacity.num_gpu_blocks)


def _with_num_gpu_blocks(loaded: LoadedConfig, num_gpu_blocks: int) -> LoadedConfig:
    config = loaded.config
    kv_cache = config.kv_cache.model_copy(update={"num_gpu_blocks": num_gpu_blocks})
    return replace(loaded, config=config.model_copy(update={"kv_cache": kv_cache}))


@placed
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
    scheduler = _scheduler(loaded, kv)
    steps, workload = _steps(loaded, seed, machine, scheduler, sink)
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
        leap=leap and promises_itself(scheduler),
    )
    return Built(
        parts=parts,
        recorder=recorder,
        workload=workload,
        cost_model=steps.cost_model,
        sampling=steps.sampling,
        warnings=steps.warnings,
    )


class _Steps(NamedTuple):
    """Who decides steps, who runs them, and what they are priced by."""

    scheduler: Scheduler
    executor: Executor
    cost_model: CostModel | None
    outcomes: TokenOutcomes | None = None
    sampling: SamplingCost | None = None
    warnings: tuple[str, ...] = ()


def _steps(
    loaded: LoadedConfig,
    seed: int,
    machine: Machine | None,
    scheduler: Scheduler,
    sink: RowSink | None,
) -> tuple[_Steps, BuiltWorkload]:
    """What runs steps, and the workload: a real one goes by outcomes, a price by its requests."""
    config = loaded.config.executor
    if isinstance(config, Real):
        steps = _real_steps(loaded, config, seed, machine, scheduler, sink)
        return steps, build_workload(loaded, seed, steps.outcomes)
    workload = build_workload(loaded, seed)
    return _simulated_steps(loaded, config, seed, scheduler, workload), workload


def _real_steps(
    loaded: LoadedConfig,
    config: Real,
    seed: int,
    machine: Machine | None,
    scheduler: Scheduler,
    sink: RowSink | None,
) -> _Steps:
    from simserve.config.build_real import build_real, open_machine

    machine = machine or open_machine(loaded)
    cost_model = None
    if config.shadow is not None:
        cost_model = build_cost_model(loaded, config.shadow.cost, "executor.shadow.cost")
    ended = sink.add_output if sink else None
    scheduler, executor, outcomes = build_real(
        loaded, machine, scheduler, drafter(loaded, seed), cost_model, ended
    )
    return _Steps(scheduler, executor, cost_model, outcomes)


def _simulated_steps(
    loaded: LoadedConfig,
    config: Simulated,
    seed: int,
    scheduler: Scheduler,
    workload: BuiltWorkload,
) -> _Steps:
    cost_model = build_cost_model(loaded, config.cost, "executor.cost")
    warnings = _shown_host(loaded, config.cost, cost_model)
    if config.noise == "residual":
        with loaded.placing("executor.noise"):
            cost_model = with_residual_noise(cost_model, seed)
    sampling = None
    if config.sampling or workload.names_sampling:
        from simserve.config.build_sampling import sampling_cost

        sampling, not_priced = sampling_cost(loaded, config, seed)
        warnings += not_priced
    executor = SimulatedExecutor(
        cost_model,
        drafter(loaded, seed),
        sampling,
        draft_cost=draft_cost(loaded),
        plans_ahead=loaded.config.scheduler.async_scheduling,
    )
    return _Steps(scheduler, executor, cost_model, sampling=sampling, warnings=tuple(warnings))


def _shown_host(loaded: LoadedConfig, config: Cost, cost_model: CostModel) -> list[str]:
    """A warning if the host's time is in each step although steps are planned ahead."""
    adds = isinstance(config, ProfileCost) and config.host == "as_measured"
    if not adds or not loaded.config.scheduler.async_scheduling:
        return []
    if not getattr(cost_model, "host_adds", False):
        return []
    return [
        "scheduler.async_scheduling: the profile was measured without it, and its host time still "
        "adds to every step (executor.cost.host: overlaps hides it, adds says that it is meant)"
    ]


def _admission(config: SchedulerConfig, max_model_len: int, kv: KVCacheManager) -> Admission:
    return Admission(
        max_model_len,
        kv,
        config.on_impossible == "as_engine",
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_extra_slots=num_draft_tokens(config) + num_lookahead_tokens(config),
    )


def _scheduler(loaded: LoadedConfig, kv: KVCacheManager) -> Scheduler:
    config = loaded.config.scheduler
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
        num_lookahead_tokens=num_lookahead_tokens(config),
        quirks=config.quirks,
        options=config.options,
    )
    is_own = ":" in config.kind
    for key, is_known in (
        ("async_scheduling", False),
        ("speculative", is_own),
        ("scheduler_reserve_full_isl", is_own),
    ):
        if getattr(config, key) and config.kind != "vllm" and not is_known:
            message = f"kind vllm has it, not '{config.kind}'"
            raise ConfigError([Problem(path=f"scheduler.{key}", message=message)])
    cls = VllmAsyncScheduler
    with loaded.placing("scheduler.kind"):
        if not config.async_scheduling:
            cls = resolve("schedulers", config.kind, loaded.base_dir)
        check_protocol(cls, "schedulers")
        with loaded.placing("scheduler.options" if config.options else "scheduler.kind"):
            scheduler: Scheduler = cls(params, kv)
        return scheduler if is_builtin("schedulers", config.kind) else checked(scheduler)


def _kv_manager(loaded: LoadedConfig) -> KVCacheManager:
    config, scheduler = loaded.config.kv_cache, loaded.config.scheduler
    with loaded.placing("kv_cache.allocator"):
        cls = resolve("allocators", config.allocator, loaded.base_dir)
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
        least = num_draft_tokens(scheduler) + 1 + scheduler.async_scheduling
        windows = [group.window for group in groups if isinstance(group, SlidingWindow)]
        if windows and min(windows) < least:
            message = f"a window of {min(windows)} is too short here: at least {least}"
            raise ConfigError([Problem(path="kv_cache.groups", message=message)])
        drafts = scheduler.speculative
        arguments["drop_last_hit"] = drafts is not None and drafts.method == "eagle"
        with loaded.placing("kv_cache.eviction"):
            arguments["free_queue"] = resolve("evictions", config.eviction, loaded.base_dir)
            check_protocol(arguments["free_queue"], "evictions")
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
