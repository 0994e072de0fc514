"""From a configuration to a model on a device, and to the executor that runs on it.

torch and the kernels are imported here, when a configuration asks for them and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simserve.config.decoding import BeamSearch, BestOf, Parallel
from simserve.config.executor import Real
from simserve.config.loader import LoadedConfig, placed
from simserve.config.model_spec import plain_spec
from simserve.config.presets import load_decoder_shape
from simserve.config.sampling_checks import contradictions
from simserve.config.trace_sampling import own_sampling
from simserve.errors import CapacityError, ConfigError, Problem
from simserve.executor.real.decoder_shape import DecoderShape
from simserve.executor.simulated import Drafter
from simserve.kv.capacity import fit_kv_cache
from simserve.protocols import CostModel, Executor, Scheduler, TokenOutcomes

if TYPE_CHECKING:
    from simserve.executor.real.draft_model import DraftSource
    from simserve.executor.real.machine import Machine, MachineOptions
    from simserve.executor.real.outcomes import Outcome
    from simserve.executor.real.speculation import Speculation

__all__ = ["build_real", "estimated_bytes", "open_machine"]


@placed
def open_machine(loaded: LoadedConfig) -> Machine:
    """Load the model, size the KV cache, compile and capture: all that a run should not wait for.

    Raises:
        ConfigError: torch or a GPU is missing, or the configuration cannot be run for real.
        TraceError: a request of the trace wants its tokens chosen in a way that cannot be.
        CapacityError: the model or its KV cache does not fit.
    """
    problems = list(_problems(loaded))
    if problems:
        raise ConfigError(problems)
    shape = load_decoder_shape(plain_spec(loaded.config.model), loaded.base_dir)
    _check_ends(loaded, shape)
    own = own_sampling(loaded, shape.eos_token_ids)
    try:
        from simserve.executor.real.machine import Machine

        with loaded.placing("executor.weights"):
            return Machine(shape, _options(loaded, own))
    except ImportError as error:
        message = f"real needs torch and triton ({error}); pip install 'simserve[gpu]'"
        raise ConfigError([Problem(path="executor.kind", message=message)]) from None


def build_real(
    loaded: LoadedConfig,
    machine: Machine,
    scheduler: Scheduler,
    drafter: Drafter | None,
    shadow: CostModel | None,
    ended: Callable[[Outcome], None] | None,
) -> tuple[Scheduler, Executor, TokenOutcomes | None]:
    """The scheduler, which tells the executor how long it took, the executor, and what it gives
    requests, where the workload ranks that.

    Args:
        loaded: the configuration.
        machine: what steps are run on.
        scheduler: decides them.
        drafter: which made-up drafts are accepted.
        shadow: prices steps beside what they took.
        ended: is given what each request has got, if tokens are sampled.
    """
    from simserve.executor.real.executor import RealExecutor
    from simserve.executor.real.outcomes import Outcomes
    from simserve.executor.real.pace import Pace, TimedScheduler

    config = loaded.config.executor
    assert isinstance(config, Real)
    timed = TimedScheduler(scheduler)
    pace = Pace(config.pace)
    outcomes = Outcomes(ended)
    speculation = _speculation(loaded, machine) if config.tokens == "sampled" else None
    executor = RealExecutor(
        machine,
        timed,
        pace,
        drafter=drafter,
        speculation=speculation,
        shadow=shadow,
        outcomes=outcomes,
    )
    ranks = any(not isinstance(one, Parallel) for one in loaded.config.workload.decodings.values())
    outcomes.keeps = ranks and config.tokens == "sampled"
    return timed, executor, outcomes if outcomes.keeps else None


def _speculation(loaded: LoadedConfig, machine: Machine) -> Speculation | None:
    """What proposes drafts of real tokens."""
    from simserve.executor.ngram import NgramProposer
    from simserve.executor.real.speculation import LookupDrafts, ModelDrafts

    scheduler = loaded.config.scheduler
    config = scheduler.speculative
    if config is None:
        return None
    assert scheduler.max_model_len is not None
    k = config.num_speculative_tokens
    if machine.draft is not None:
        return ModelDrafts(machine.draft, k, scheduler.max_model_len)
    proposer = NgramProposer(*config.lookup, k, scheduler.max_model_len, scheduler.quirks)
    return LookupDrafts(proposer)


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
            draft=loaded.draft if _computes_drafts(loaded) else None,
        )
    except (CapacityError, ConfigError):
        return None
    pool = kv_cache.num_gpu_blocks * kv_cache.block_size * one.kv_bytes_per_token
    beside = one.weight_bytes + one.activation_bytes + one.cuda_graph_bytes + one.partition_bytes
    return beside + one.alignment_bytes + pool


def _computes_drafts(loaded: LoadedConfig) -> bool:
    """Whether the draft model is loaded too; made-up drafts need none."""
    real = loaded.config.executor
    assert isinstance(real, Real)
    return loaded.draft is not None and real.tokens == "sampled"


def _draft_source(loaded: LoadedConfig) -> DraftSource | None:
    from simserve.executor.real.draft_model import DraftSource

    real, speculative = loaded.config.executor, loaded.config.scheduler.speculative
    if not _computes_drafts(loaded):
        return None
    assert isinstance(real, Real)
    assert speculative is not None
    assert speculative.draft_model is not None
    shape = load_decoder_shape(plain_spec(speculative.draft_model), loaded.base_dir)
    return DraftSource(shape, _weights(loaded, real.draft_weights))


def _weights(loaded: LoadedConfig, given: str) -> str | Path:
    return given if given == "random" else loaded.path(given)


def _problems(loaded: LoadedConfig) -> list[Problem]:
    """What cannot be run for real, though it can be simulated."""
    config = loaded.config
    real, scheduler = config.executor, config.scheduler
    assert isinstance(real, Real)
    sampled = real.tokens == "sampled"
    vocab_size, wanted = loaded.model.vocab_size, _max_logprobs(loaded)
    ghosts = scheduler.policy == "priority" and scheduler.quirks == "as_engine"
    checks = (
        (
            "kv_cache.groups",
            config.kv_cache.groups is not None and len(config.kv_cache.groups) > 1,
            "the real executor has one group: all layers alike",
        ),
        (
            "executor.tokens",
            sampled and ghosts,
            "under policy priority the engine gives requests tokens that nobody computed: "
            "use scheduler.quirks: fixed with sampled, or replay",
        ),
        (
            "executor.max_logprobs",
            wanted is not None and wanted > vocab_size,
            f"{wanted} log-probabilities are wanted, but {loaded.model.name} has {vocab_size} "
            "tokens",
        ),
        (
            "executor.max_logprobs",
            wanted is not None and not sampled,
            "has no effect with executor.tokens replay: use tokens sampled",
        ),
    )
    return [Problem(path=path, message=message) for path, fails, message in checks if fails]


def _options(loaded: LoadedConfig, own: Sequence[Mapping[str, Any]]) -> MachineOptions:
    from simserve.executor.real.attention import AttentionPath
    from simserve.executor.real.choices import SamplingChoice
    from simserve.executor.real.machine import MachineOptions

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
        weights=_weights(loaded, real.weights),
        draft=_draft_source(loaded),
        seed=config.seed,
        breakdown=real.breakdown,
        sampling=tuple(SamplingChoice(one.weight, one.of_request) for one in real.sampling),
        own_sampling=tuple(own),
        max_logprobs=_max_logprobs(loaded, own),
    )


def _max_logprobs(loaded: LoadedConfig, own: Sequence[Mapping[str, Any]] = ()) -> int | None:
    """The most log-probabilities that a request may want; None if none may."""
    real, vocab_size = loaded.config.executor, loaded.model.vocab_size
    assert isinstance(real, Real)
    wanted = [one.logprobs for one in real.sampling] + [real.max_logprobs]
    wanted += [one.get("logprobs") for one in own]
    decodings = loaded.config.workload.decodings if real.tokens == "sampled" else {}
    for decoding in decodings.values():
        if isinstance(decoding, BeamSearch):
            wanted.append(min(2 * decoding.beam_width, vocab_size))
        elif isinstance(decoding, BestOf):
            wanted.append(0)
    return max((one for one in wanted if one is not None), default=None)


def _check_ends(loaded: LoadedConfig, shape: DecoderShape) -> None:
    """Refuse to wait for an end of sequence that the model does not name, or to allow nothing else
    where none is allowed."""
    real = loaded.config.executor
    assert isinstance(real, Real)
    entries = {f"executor.sampling.{i}": one for i, one in enumerate(real.sampling)}
    classes = {f"workload.{key}": one for key, one in loaded.config.workload.samplings.items()}
    waits = [path for path, one in {**entries, **classes}.items() if not one.ignore_eos]
    if waits and not shape.eos_token_ids:
        message = f"{shape.model.name} names no eos_token_id: give it as one of stop_token_ids"
        raise ConfigError([Problem(path=f"{waits[0]}.ignore_eos", message=message)])
    if problems := list(contradictions(loaded.config, loaded.model, shape.eos_token_ids)):
        raise ConfigError(problems)
