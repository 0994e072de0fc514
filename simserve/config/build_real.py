"""From a configuration to a model on a device, and to the executor that runs on it.

torch and the kernels are imported here, when a configuration asks for them and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simserve.config.executor import Real
from simserve.config.loader import LoadedConfig
from simserve.config.model import ModelFile
from simserve.config.presets import load_decoder_shape
from simserve.errors import CapacityError, ConfigError, Problem
from simserve.executor.simulated import Drafter
from simserve.kv.capacity import fit_kv_cache
from simserve.protocols import CostModel, Executor, Scheduler

if TYPE_CHECKING:
    from simserve.executor.real.machine import Machine, MachineOptions

__all__ = ["build_real", "estimated_bytes", "open_machine"]


def open_machine(loaded: LoadedConfig) -> Machine:
    """Load the model, size the KV cache, compile and capture: all that a run should not wait for.

    Raises:
        ConfigError: torch or a GPU is missing, or the configuration cannot be run for real.
        CapacityError: the model or its KV cache does not fit.
    """
    problems = list(_problems(loaded))
    if problems:
        raise ConfigError(problems)
    model = loaded.config.model
    spec = {"config": model.config} if isinstance(model, ModelFile) else model
    shape = load_decoder_shape(spec, loaded.base_dir)
    try:
        from simserve.executor.real.machine import Machine

        return Machine(shape, _options(loaded))
    except ImportError as error:
        message = f"real needs torch and triton ({error}); pip install 'simserve[gpu]'"
        raise ConfigError([Problem(path="executor.kind", message=message)]) from None


def build_real(
    loaded: LoadedConfig,
    machine: Machine,
    scheduler: Scheduler,
    drafter: Drafter | None,
    shadow: CostModel | None,
) -> tuple[Scheduler, Executor]:
    """The executor, and the scheduler that tells it how long it took."""
    from simserve.executor.real.executor import RealExecutor
    from simserve.executor.real.pace import Pace, TimedScheduler

    config = loaded.config.executor
    assert isinstance(config, Real)
    timed = TimedScheduler(scheduler)
    pace = Pace(config.pace)
    return timed, RealExecutor(machine, timed, pace, drafter=drafter, shadow=shadow)


def estimated_bytes(loaded: LoadedConfig) -> int | None:
    """What `simserve capacity` expects the model and this pool to take; None if nothing would fit
    on the GPU of the configuration."""
    config = loaded.config
    scheduler, kv_cache = config.scheduler, config.kv_cache
    assert scheduler.max_num_batched_tokens is not None
    assert scheduler.max_num_seqs is not None
    assert isinstance(kv_cache.num_gpu_blocks, int)
    try:
        one = fit_kv_cache(
            loaded.model,
            loaded.gpu,
            kv_cache_dtype=kv_cache.dtype,
            block_size=kv_cache.block_size,
            gpu_memory_utilization=1.0,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
        )
    except (CapacityError, ConfigError):
        return None
    pool = kv_cache.num_gpu_blocks * kv_cache.block_size * one.kv_bytes_per_token
    beside = one.weight_bytes + one.activation_bytes + one.cuda_graph_bytes + one.partition_bytes
    return beside + one.alignment_bytes + pool


def _problems(loaded: LoadedConfig) -> list[Problem]:
    """What cannot be run for real, though it can be simulated."""
    config = loaded.config
    real, scheduler = config.executor, config.scheduler
    assert isinstance(real, Real)
    sampled = real.tokens == "sampled"
    ghosts = scheduler.policy == "priority" and scheduler.quirks == "as_engine"
    checks = (
        (
            "kv_cache.groups",
            config.kv_cache.groups is not None and len(config.kv_cache.groups) > 1,
            "the real executor has one group: all layers alike",
        ),
        (
            "executor.tokens",
            sampled and scheduler.speculative is not None,
            "sampled does not go with scheduler.speculative, whose drafts are made up: use replay",
        ),
        (
            "executor.tokens",
            sampled and ghosts,
            "under policy priority the engine gives requests tokens that nobody computed: "
            "use scheduler.quirks: fixed with sampled, or replay",
        ),
    )
    return [Problem(path=path, message=message) for path, fails, message in checks if fails]


def _options(loaded: LoadedConfig) -> MachineOptions:
    from simserve.executor.real.attention import AttentionPath
    from simserve.executor.real.machine import MachineOptions
    from simserve.executor.real.sampler import SamplingChoice

    config = loaded.config
    real, scheduler, kv_cache = config.executor, config.scheduler, config.kv_cache
    assert isinstance(real, Real)
    assert scheduler.max_num_batched_tokens is not None
    assert scheduler.max_num_seqs is not None
    assert scheduler.max_model_len is not None
    speculative, blocks = scheduler.speculative, kv_cache.num_gpu_blocks
    num_draft_tokens = speculative.num_speculative_tokens if speculative else 0
    return MachineOptions(
        device=real.device,
        path=AttentionPath(real.attention, real.kv_layout, real.mixed, num_draft_tokens),
        replays=real.tokens == "replay",
        dtype=loaded.model.dtype if real.dtype == "auto" else real.dtype,
        kv_dtype=kv_cache.dtype,
        block_size=kv_cache.block_size,
        num_gpu_blocks=blocks if isinstance(blocks, int) else None,
        gpu_memory_utilization=kv_cache.gpu_memory_utilization,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
        weights="random" if real.weights == "random" else loaded.path(real.weights),
        seed=config.seed,
        breakdown=real.breakdown,
        sampling=tuple(SamplingChoice(**one.model_dump()) for one in real.sampling),
    )
