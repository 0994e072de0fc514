"""Run a configuration: what notebooks, the command line and everything above call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

from simserve.config.build import Built, build, with_pool_size
from simserve.config.dump import dump_config
from simserve.config.environment import collect
from simserve.config.executor import Real
from simserve.config.loader import ConfigSource, LoadedConfig, load_config
from simserve.config.overrides import Overrides
from simserve.config.scheduler import Scheduler
from simserve.engine.simulation import Outcome, ctrl_c_calls, simulate
from simserve.errors import StalledError, TraceError
from simserve.metrics.options import MetricOptions, RunInfo, Scalar
from simserve.metrics.recorder import RowSink, RunData
from simserve.metrics.repetitions import summarise_repetitions
from simserve.metrics.result import RunFacts, RunResult
from simserve.metrics.rundir import PICTURE, new_run
from simserve.metrics.summary import summarise
from simserve.metrics.tables import requests_table, steps_table
from simserve.protocols import KVCacheManager
from simserve.shapes import resolve_kv_dtype

if TYPE_CHECKING:
    from simserve.executor.real.machine import Machine

__all__ = ["Progress", "RunResult", "Written", "run", "run_to_directory"]

Progress = Callable[[float, int, int | None], object]
"""Called with the simulated time (s), requests done, and requests in all (None: not known)."""


class Written(NamedTuple):
    """A run directory and what it says."""

    summary: Mapping[str, Scalar]
    directory: Path
    picture: Path | None
    warnings: tuple[str, ...] = ()
    """Of the configuration, and of what came up in the run."""


class _Run(NamedTuple):
    """One simulation."""

    facts: RunFacts
    data: RunData
    stopped: bool
    """Ctrl-C came, during it or while its numbers were made."""


def run(
    config: ConfigSource | LoadedConfig,
    overrides: Overrides = (),
    *,
    progress: Progress | None = None,
    machine: Machine | None = None,
) -> RunResult:
    """Simulate a configuration; nothing is written.

    Args:
        config: a YAML file's path, the same as nested dicts, or a configuration already loaded.
        overrides: `KEY=VALUE` strings or values by dotted path, applied in order.
        progress: called after each step.
        machine: an open one for real runs, which stays open; None: one is opened for this run.

    Raises:
        ConfigError: the configuration is wrong; all faults, with positions.
        TraceError: the trace is wrong.
        CapacityError: the model leaves no room for a KV cache.
        StalledError: requests wait that can never run.
    """
    loaded = config if isinstance(config, LoadedConfig) else load_config(config, overrides)
    facts, data = _run_all(loaded, progress, machine)
    return facts.with_tables(
        requests_table(data, loaded.config.metrics.save_detailed), steps_table(data)
    )


def run_to_directory(
    loaded: LoadedConfig, *, out: Path, progress: Progress | None = None
) -> Written:
    """Simulate and write a run directory, which appears under its name only when complete.

    Raises:
        RunDirectoryError: `out` is there and not empty, or cannot be written.
        SimserveError: as `run` has it.
    """
    metrics = loaded.config.metrics
    overwrite = _is_empty_folder(out)
    with new_run(out, overwrite=overwrite, save_detailed=metrics.save_detailed) as new:
        facts, _ = _run_all(loaded, progress, sink=new.tables)
        picture = None
        with ctrl_c_calls(lambda: None):  # what was simulated is written, whatever comes now
            new.close(facts)
            if metrics.plot:
                from simserve.report.run_plot import draw_run

                picture = draw_run(new.result(facts))
            directory = new.take_place(picture)
    drawn = directory / PICTURE if picture else None
    return Written(facts.summary_dict, directory, drawn, facts.warnings)


def _run_all(
    loaded: LoadedConfig,
    progress: Progress | None,
    machine: Machine | None = None,
    sink: RowSink | None = None,
) -> tuple[RunFacts, RunData]:
    """All repetitions until Ctrl-C; the rows are those of the first. One that was cut short counts
    only if there is no whole one."""
    opened = None
    if isinstance(loaded.config.executor, Real) and machine is None:
        from simserve.config.build_real import open_machine

        machine = opened = open_machine(loaded)
    loaded = with_pool_size(loaded, machine)
    first_seed = loaded.config.seed
    count = loaded.config.metrics.repetitions
    done: list[_Run] = []
    try:
        for seed in range(first_seed, first_seed + count):
            try:
                one = _run_once(loaded, seed, progress, machine, None if done else sink)
            except KeyboardInterrupt:  # between two simulations
                if not done:
                    raise
                break
            if not done or one.facts.summary_dict["status"] != "interrupted":
                done.append(one)
            if one.stopped:
                break
    finally:
        if opened is not None:
            opened.close()
    with ctrl_c_calls(lambda: None):
        return _merged(done, first_seed, count), done[0].data


def _merged(done: list[_Run], first_seed: int, count: int) -> RunFacts:
    """The facts of the first of `count` repetitions, with the summary of all that were done.

    Its warnings are in the summary too, where whoever has only that, or a table of many, sees them.
    """
    facts = done[0].facts
    if len(done) > 1:
        facts.repetitions = tuple(one.facts.summary_dict for one in done)
        facts.summary_dict = summarise_repetitions(facts.repetitions, first_seed)
    if len(done) < count:
        facts.summary_dict = {**facts.summary_dict, "status": "interrupted"}
    if facts.warnings:
        facts.summary_dict = {**facts.summary_dict, "warnings": "; ".join(facts.warnings)}
    return facts


def _is_empty_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not any(path.iterdir())
    except OSError:  # `new_run` says what is wrong with it
        return False


def _run_once(
    loaded: LoadedConfig,
    seed: int,
    progress: Progress | None,
    machine: Machine | None,
    sink: RowSink | None,
) -> _Run:
    kv = None
    if loaded.config.kv_cache.prefix_cache_at_start == "warm":
        kv = _warmed(loaded, seed, machine)
    built = build(loaded, seed, machine=machine, sink=sink, kv=kv)
    outcome = _simulate(loaded, built, progress)
    if not built.recorder.num_requests:
        raise TraceError(f"no requests are left to run; left out: {dict(built.workload.counts)}")
    metrics = loaded.config.metrics
    window = metrics.window
    goodput = metrics.goodput
    options = MetricOptions(
        percentiles=metrics.percentiles,
        percentile_metrics=metrics.percentile_metrics,
        goodput=goodput.model_dump(exclude_none=True) if goodput else {},
        window_s=(window.start_s, window.end_s) if window else None,
        save_detailed=metrics.save_detailed,
    )
    pressed = Event()
    # Once rows have left for a file, what was simulated is written, whatever comes.
    with ctrl_c_calls(pressed.set) if sink is not None else nullcontext():
        data = built.recorder.data()
        facts = RunFacts(
            summary_dict=summarise(data, _info(loaded, built, seed, machine), options),
            config=dump_config(loaded.config),
            env=_environment(built, machine),
            warnings=(*loaded.warnings, *_remarks(built)),
            choices=tuple(asdict(choice) for choice in built.workload.choices),
        )
    return _Run(facts, data, pressed.is_set() or outcome.status == "interrupted")


def _simulate(loaded: LoadedConfig, built: Built, progress: Progress | None) -> Outcome:
    outcome = simulate(
        built.parts,
        async_scheduling=loaded.config.scheduler.async_scheduling,
        progress=progress,
    )
    if outcome.complaint:
        raise StalledError(outcome.complaint)
    return outcome


def _warmed(loaded: LoadedConfig, seed: int, machine: Machine | None) -> KVCacheManager:
    """The KV cache as the run's own requests leave it when they are served once."""
    built = build(loaded, seed, machine=machine)
    if _simulate(loaded, built, None).status == "interrupted":
        raise KeyboardInterrupt
    return built.parts.kv


def _info(loaded: LoadedConfig, built: Built, seed: int, machine: Machine | None) -> RunInfo:
    config = loaded.config
    cost_kind = config.executor.cost.kind
    timing = "measured" if machine else getattr(built.cost_model, "timing", cost_kind)
    extra: dict[str, Scalar] = {
        "seed": seed,
        "scheduler": config.scheduler.kind,
        "decisions": _decisions(config.scheduler),
        "timing": timing,
        "reachable_in_engine": loaded.reachable_in_engine,
        "gpu": loaded.gpu.name,
        **_conditions(loaded, built, machine),
        "num_gpu_blocks": built.parts.kv.num_gpu_blocks,
        "out_of_domain_steps": getattr(built.cost_model, "out_of_domain_steps", None),
    }
    if built.workload.sessions is not None:
        extra["num_not_sent"] = built.workload.sessions.num_not_sent
    extra |= {f"workload.{name}": count for name, count in sorted(built.workload.counts.items())}
    if machine is not None:
        from simserve.config.build_real import estimated_bytes

        extra |= {f"executor.{name}": fact for name, fact in machine.facts.items()}
        extra["executor.estimated_gpu_memory_bytes"] = estimated_bytes(loaded)
    return RunInfo(
        backend="simserve-sim" if machine is None else "simserve-real",
        date=None if machine is None else f"{datetime.now(UTC):%Y%m%d-%H%M%S}",
        label=config.label,
        model_id=loaded.model.name,
        request_rate=built.workload.request_rate,
        burstiness=built.workload.burstiness,
        max_concurrency=config.workload.max_concurrency,
        extra=extra,
    )


def _decisions(scheduler: Scheduler) -> str:
    """Whose decisions the run has."""
    if scheduler.kind == "vllm":
        return f"vllm {scheduler.compat}"
    return f"own scheduler {scheduler.kind}" if ":" in scheduler.kind else scheduler.kind


def _conditions(loaded: LoadedConfig, built: Built, machine: Machine | None) -> dict[str, Scalar]:
    """What a reader of the numbers has to know of how they were taken."""
    model, executor, kv_cache = loaded.model, loaded.config.executor, loaded.config.kv_cache
    at_start = kv_cache.prefix_cache_at_start
    facts: dict[str, Scalar] = {
        "dtype": model.dtype,
        "kv_cache_dtype": resolve_kv_dtype(model, kv_cache.dtype),
        "clock": executor.pace if isinstance(executor, Real) else "virtual",
        "prefix_cache_at_start": at_start if built.parts.kv.enable_prefix_caching else "off",
        "warm_up": "none",
    }
    if machine is not None:
        facts |= {"dtype": machine.facts["dtype"], "kv_cache_dtype": machine.facts["kv_dtype"]}
        if machine.facts["device"] == "cuda":
            facts["warm_up"] = "kernels compiled and CUDA graphs captured before the clock started"
    return facts


def _environment(built: Built, machine: Machine | None) -> dict[str, Any]:
    trace = built.workload.trace
    facts = collect()
    if machine is not None:
        facts["executor"] = machine.facts
    if trace is not None:
        facts["trace"] = {
            "sha256": trace.report.sha256,
            "format": trace.format,
            "dropped": dict(trace.report.dropped),
        }
    return facts


def _remarks(built: Built) -> tuple[str, ...]:
    trace = built.workload.trace
    of_trace = trace.report.warnings if trace is not None else ()
    of_sampling = built.sampling.remarks if built.sampling is not None else ()
    of_cost = getattr(built.cost_model, "remarks", ())
    return (*of_trace, *built.warnings, *of_cost, *of_sampling)
