"""From the workload's configuration to requests over time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simserve.config import distributions
from simserve.config import workload as keys
from simserve.config.executor import Real
from simserve.config.loader import LoadedConfig
from simserve.errors import ConfigError, Problem, TraceError
from simserve.protocols import TokenOutcomes, Workload
from simserve.workload import arrivals, lengths
from simserve.workload.public import find_trace
from simserve.workload.source import (
    ConcurrencyCap,
    OpenLoop,
    OwnOutputs,
    OwnSampling,
    Sessions,
)
from simserve.workload.synthetic import RequestClass, SharedPrefix, Synthetic, generate

if TYPE_CHECKING:
    from simserve.workload.ranked import Choice
    from simserve.workload.trace import Trace

__all__ = ["BuiltWorkload", "build_workload", "trace_of"]

_ARRIVALS: dict[str, Callable[..., arrivals.ArrivalProcess]] = {
    "immediate": lambda: arrivals.ConstantArrivals(rate=math.inf),
    "constant": arrivals.ConstantArrivals,
    "poisson": arrivals.PoissonArrivals,
    "gamma": arrivals.GammaArrivals,
    "bursts": arrivals.BurstArrivals,
    "ramp": arrivals.RampArrivals,
}
_LENGTHS: dict[str, Callable[..., lengths.Length]] = {
    "constant": lengths.ConstantLength,
    "uniform": lengths.UniformLength,
    "lognormal": lengths.LognormalLength,
    "zipf": lengths.ZipfLength,
    "empirical": lengths.EmpiricalLength,
}


@dataclass(slots=True)
class BuiltWorkload:
    """Requests over time, and what is known of them."""

    source: Workload
    request_rate: float | str | None = None
    """Arrivals per second asked for; `inf`: all at once; None: as the trace has them."""
    burstiness: float | None = None
    trace: Trace | None = None
    sessions: Sessions | None = None
    """The closed-loop conversations, if that is what the source is."""
    shares_prefixes: bool = True
    """Whether two prompts can begin alike."""
    names_sequences: bool = False
    """Whether some requests say themselves how many sequences they want."""
    names_sampling: bool = False
    """Whether some requests, or their classes, say how their tokens are chosen."""
    choices: list[Choice] = field(default_factory=list)
    """Sequences that were ranked best; filled while the simulation goes on."""
    counts: Counter[str] = field(default_factory=Counter)
    """What transforms dropped or changed; filled while the workload is read."""


def build_workload(
    loaded: LoadedConfig, seed: int, outcomes: TokenOutcomes | None = None
) -> BuiltWorkload:
    """Make the workload of a configuration.

    Args:
        loaded: the configuration.
        seed: of all that is drawn.
        outcomes: what a model gives requests; None: nothing is known of that.

    Raises:
        ConfigError: values that do not go together, or a public trace that was not fetched.
        TraceError: the trace file is wrong.
    """
    config = loaded.config.workload
    try:
        if config.trace is not None:
            built = _from_trace(loaded, config.trace, seed)
        else:
            assert config.synthetic is not None
            built = _synthetic(config.synthetic, seed)
    except ValueError as error:
        raise ConfigError([Problem(path="workload", message=str(error))]) from error
    if isinstance(built.source, Sessions):
        built.sessions = built.source
    if config.max_concurrency is not None:
        built.source = ConcurrencyCap(built.source, config.max_concurrency)
    if built.names_sequences or config.decodings:
        built.source = _grouped(config, seed, built, outcomes)
        built.shares_prefixes = True
    executor = loaded.config.executor
    if isinstance(executor, Real) and executor.tokens == "sampled":
        built.source = OwnOutputs(built.source)
    classes = config.synthetic.classes if config.synthetic else ()
    if by_class := {one.name: one.sampling.given for one in classes if one.sampling is not None}:
        built.source = OwnSampling(built.source, by_class)
        built.names_sampling = True
    return built


def _grouped(
    config: keys.Workload, seed: int, built: BuiltWorkload, outcomes: TokenOutcomes | None
) -> Workload:
    from simserve.config.build_decoding import build_method
    from simserve.workload.groups import Grouped

    method = build_method(config, seed, built.sessions is not None, outcomes, built.choices)
    return Grouped(built.source, method)


def trace_of(loaded: LoadedConfig, config: keys.TraceWorkload) -> Trace:
    """The trace of a configuration, nothing of it read or changed yet.

    Raises:
        ConfigError: an option is wrong, or a public trace was not fetched.
        TraceError: the file is wrong.
    """
    from simserve.workload.trace import open_trace

    options: dict[str, Any] = dict(config.options)
    with loaded.placing("workload.trace.path"):
        file = _file_of(loaded, config)
        if not file.exists():
            raise ConfigError(f"{file}: there is no such file")
        if file.is_dir():
            raise ConfigError(f"{file}: is a folder, not a file")
    with loaded.placing("workload.trace.options" if options else "workload.trace.format"):
        return open_trace(
            file,
            format=config.format,
            on_bad_row=loaded.config.workload.on_bad_row,
            base_dir=loaded.base_dir,
            reader_options=options,
        )


def _from_trace(loaded: LoadedConfig, config: keys.TraceWorkload, seed: int) -> BuiltWorkload:
    from simserve.workload.sessions import group_sessions
    from simserve.workload.transform import Transforms

    trace = trace_of(loaded, config)
    transforms = Transforms(
        start_s=config.start_s or None,
        end_s=config.end_s,
        spread_ties_s=config.spread_ties_s,
        speedup_ratio=_unless_one(config.speedup),
        prompt_len_multiplier=_unless_one(config.prompt_len_multiplier),
        output_len_multiplier=_unless_one(config.output_len_multiplier),
        truncate_to=config.truncate_to,
        max_isl=config.max_isl,
        max_osl=config.max_osl,
        num_requests=config.num_requests,
    )
    counts: Counter[str] = Counter()
    requests = transforms.apply(trace.requests(), counts, seed)
    source: Workload
    features = trace.features
    if features.several is not None and loaded.config.workload.decoding is not None:
        number, n = features.several
        raise TraceError(
            f"{trace.path}:{number}: n: is {n}, but workload.decoding says how many sequences a "
            "request becomes: leave out one of the two"
        )
    known = None if transforms != Transforms() else trace.num_requests
    if features.waits:
        source = Sessions(group_sessions(requests), known, trace.place_of)
    else:
        source = OpenLoop(requests, known, trace.place_of)
    return BuiltWorkload(
        source,
        trace=trace,
        counts=counts,
        shares_prefixes=trace.shares_prefixes,
        names_sequences=features.several is not None,
        names_sampling=features.names_sampling,
    )


def _file_of(loaded: LoadedConfig, config: keys.TraceWorkload) -> Path:
    if config.name is not None:
        try:
            return find_trace(config.name)
        except TraceError as error:
            problem = Problem(path="workload.trace.name", message=str(error))
            raise ConfigError([problem]) from error
    assert config.path is not None
    return loaded.path(config.path)


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor


def _synthetic(config: keys.SyntheticWorkload, seed: int) -> BuiltWorkload:
    arrival = _ARRIVALS[config.arrival.kind](**config.arrival.model_dump(exclude={"kind"}))
    rate = getattr(config.arrival, "rate", None)
    if isinstance(config.arrival, distributions.Immediate):
        rate = "inf"
    burstiness = getattr(config.arrival, "burstiness", 1.0 if rate and rate != "inf" else None)
    source = (
        _single_requests(config, arrival, seed)
        if config.sessions is None
        else _conversations(config, config.sessions, arrival, seed)
    )
    shares = config.shared_prefix is not None or config.sessions is not None
    return BuiltWorkload(source, rate, burstiness, shares_prefixes=shares)


def _single_requests(
    config: keys.SyntheticWorkload, arrival: arrivals.ArrivalProcess, seed: int
) -> Workload:
    classes = tuple(
        RequestClass(
            lengths=_pair(one.prompt_len or config.prompt_len, one.output_len or config.output_len),
            name=one.name,
            weight=one.weight,
            count=one.count,
            priority=one.priority,
        )
        for one in config.classes
    )
    spec = Synthetic(
        arrival=arrival,
        classes=classes or (RequestClass(lengths=_pair(config.prompt_len, config.output_len)),),
        num_requests=config.num_requests,
        shared_prefix=_prefix(config.shared_prefix),
        seed=seed,
    )
    return OpenLoop(generate(spec), spec.total)


def _conversations(
    config: keys.SyntheticWorkload,
    sessions: keys.Sessions,
    arrival: arrivals.ArrivalProcess,
    seed: int,
) -> Workload:
    from simserve.workload.sessions import (
        SyntheticSessions,
        generate_sessions,
        in_arrival_order,
    )

    spec = SyntheticSessions(
        num_sessions=sessions.num_sessions,
        arrival=arrival,
        num_turns=_length(sessions.turns),
        prompt_len=_length(config.prompt_len),
        output_len=_length(config.output_len),
        think_time_s=sessions.think_time_s,
        think_time=sessions.think_time,
        shared_prefix=_prefix(config.shared_prefix),
        seed=seed,
    )
    total = int(spec.turns().sum())
    if sessions.loop == "closed":
        return Sessions(generate_sessions(spec), total)
    return OpenLoop(in_arrival_order(generate_sessions(spec)), total)


def _length(config: distributions.Length) -> lengths.Length:
    return _LENGTHS[config.kind](**config.model_dump(exclude={"kind"}))


def _pair(
    prompt_len: distributions.Length, output_len: distributions.Length
) -> lengths.IndependentLengths:
    return lengths.IndependentLengths(
        prompt_len=_length(prompt_len), output_len=_length(output_len)
    )


def _prefix(config: keys.SharedPrefix | None) -> SharedPrefix | None:
    if config is None:
        return None
    return SharedPrefix(
        num_groups=config.num_groups,
        prefix_len=_length(config.prefix_len),
        zipf_alpha=config.zipf_alpha,
    )
