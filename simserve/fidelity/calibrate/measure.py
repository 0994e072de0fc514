"""Measures the real executor within a time limit: designed steps and traffic in turns.

The host's speed changes within some ten seconds, so its times are taken all along, not at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import simserve
from simserve.config.build import build, with_pool_size
from simserve.config.build_real import open_machine
from simserve.config.environment import collect
from simserve.config.loader import LoadedConfig, load_config
from simserve.config.presets import gpu_names
from simserve.cost.dealing import Dealer
from simserve.engine.simulation import simulate
from simserve.errors import SimserveError
from simserve.executor.real.bench.gpu import require_gpu
from simserve.executor.real.bench.step_cases import StepCase
from simserve.executor.real.bench.steps import measure_steps
from simserve.fidelity.calibrate.calibration import Calibration
from simserve.fidelity.calibrate.design import Limits, design, num_rest_steps, traffic
from simserve.fidelity.logs import executor_facts
from simserve.fidelity.logs.observations import Observations
from simserve.fidelity.logs.step_watch import MeasuredSteps, StepWatch
from simserve.shapes import resolve_kv_dtype

if TYPE_CHECKING:
    from simserve.executor.real.machine import Machine

__all__ = ["gpu_here", "measure", "require_device"]

Tell = Callable[[str], object]

_NUM_WARMUP_STEPS = 1
_NUM_STEPS = 3
_TRAFFIC_STEPS = 100
_RESERVE_S = 6.0
"""For the fit and the picture."""


def require_device(device: str) -> None:
    """Find out before anything else whether there is something to measure on. A device that does
    not exist is left to the configuration.

    Raises:
        SimserveError: torch is missing, or, for cuda, triton or a GPU that torch sees.
    """
    if device == "cuda":
        require_gpu("simserve calibrate")
    elif device == "cpu" and find_spec("torch") is None:
        raise SimserveError(
            "simserve calibrate --device cpu needs torch, not installed here: "
            "pip install 'simserve[gpu]'"
        )


def gpu_here() -> str:
    """The preset of this machine's GPU.

    Raises:
        SimserveError: there is none, or it has no preset.
    """
    found = collect()["gpu"] or ""
    words = found.lower().replace(",", " ").split()
    for name in sorted(gpu_names(), key=len, reverse=True):
        if name in words:
            return name
    what = f"'{found}' is no preset" if found else "no GPU was found here"
    raise SimserveError(
        f"{what}: say with --gpu whose data sheet to use ({', '.join(gpu_names())})"
    )


def measure(
    source: Mapping[str, object],
    overrides: Sequence[str] = (),
    *,
    time_limit_s: float,
    traffic_steps: int = _TRAFFIC_STEPS,
    tell: Tell = lambda text: None,
) -> Calibration:
    """Open a machine and measure it. All designed steps and all traffic run once in any case, and
    further parts of them as long as time is left.

    Args:
        source: a configuration without a workload, `executor.kind: real`.
        overrides: `KEY=VALUE` for it.
        time_limit_s: from now to the end of the fit.
        traffic_steps: steps of each stream of traffic; the one that is held out has twice as many.
        tell: is told what goes on.

    Raises:
        ConfigError: torch or a GPU is missing, or the configuration cannot be run for real.
        CapacityError: the model or its KV cache does not fit.
    """
    began = perf_counter()
    first = _load(source, overrides, {"synthetic": {}})
    machine = open_machine(first)
    try:
        bench = _Bench(source, overrides, first, machine)
        tell(f"ready after {perf_counter() - began:.0f} s, {len(bench.cases)} designed steps")
        fitted, held_out = traffic(bench.limits)
        unseen = bench.traffic(held_out, 0, 2 * traffic_steps)
        designed, streams, longest_s = [], [], 0.0
        for number in count():
            start = perf_counter()
            if number >= len(fitted) and start + longest_s > began + time_limit_s - _RESERVE_S:
                break
            turn, part = divmod(number, len(fitted))
            designed.append(bench.designed(turn, part, len(fitted)))
            streams.append(bench.traffic(fitted[part], 1 + number, traffic_steps))
            longest_s = max(longest_s, perf_counter() - start)
        tell(f"{number} turns done at {start - began:.0f} s; all is measured in {len(fitted)}")
        if start > began + time_limit_s:
            tell(f"the limit of {time_limit_s:g} s is passed: these take longer")
        return bench.calibration(designed, streams, unseen)
    finally:
        machine.close()


def _load(
    source: Mapping[str, object], overrides: Sequence[str], workload: Mapping[str, object]
) -> LoadedConfig:
    return load_config({**source, "workload": dict(workload)}, list(overrides))


class _Bench:
    """One machine, and what is measured on it."""

    def __init__(
        self,
        source: Mapping[str, object],
        overrides: Sequence[str],
        loaded: LoadedConfig,
        machine: Machine,
    ) -> None:
        self._source = source
        self._overrides = overrides
        self._loaded = with_pool_size(loaded, machine)
        self._machine = machine
        scheduler, kv_cache = self._loaded.config.scheduler, self._loaded.config.kv_cache
        assert scheduler.max_num_seqs is not None
        assert scheduler.max_num_batched_tokens is not None
        assert scheduler.max_model_len is not None
        assert isinstance(kv_cache.num_gpu_blocks, int)
        self.limits = Limits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
            num_kv_tokens=(kv_cache.num_gpu_blocks - 1) * kv_cache.block_size,
            block_size=kv_cache.block_size,
        )
        self._graphs = executor_facts.graphs(
            machine.facts, self.limits.max_num_seqs, self.limits.max_num_batched_tokens
        )
        self._attention_plan = executor_facts.attention_plan(machine.facts)
        self.cases: list[StepCase] = design(self.limits, _NUM_WARMUP_STEPS + _NUM_STEPS)

    def designed(self, turn: int, part: int, num_parts: int) -> MeasuredSteps:
        """One of so many parts of all designed steps, in each turn others: what drifts is spread
        over all of them."""
        parts = build(self._loaded, self._loaded.config.seed, machine=self._machine).parts
        watch = self._watch(parts.executor)
        order = np.random.default_rng(turn).permutation(len(self.cases))[part::num_parts]
        samples = measure_steps(
            watch,
            [self.cases[place] for place in order],
            block_size=self.limits.block_size,
            num_gpu_blocks=parts.kv.num_gpu_blocks,
            num_warmup_steps=_NUM_WARMUP_STEPS,
            num_steps=_NUM_STEPS,
            num_rest_steps=num_rest_steps,
        )
        for _ in samples:
            pass
        return watch.measured()

    def traffic(self, workload: Mapping[str, object], seed: int, num_steps: int) -> MeasuredSteps:
        """The first steps of a workload, through the scheduler."""
        loaded = _load(self._source, self._overrides, workload)
        parts = build(with_pool_size(loaded, self._machine), seed, machine=self._machine).parts
        parts.executor = watch = self._watch(parts.executor)
        parts.max_steps = num_steps
        simulate(parts)
        return watch.measured()

    def _watch(self, executor: Any) -> StepWatch:
        watch = StepWatch(executor, self._loaded.model.sliding_window, _NUM_WARMUP_STEPS)
        if self._attention_plan is not None:
            watch.deal(Dealer(self._attention_plan, self._loaded.model), self._graphs.sizes)
        return watch

    def calibration(
        self,
        designed: Sequence[MeasuredSteps],
        streams: Sequence[MeasuredSteps],
        held_out: MeasuredSteps,
    ) -> Calibration:
        """All of it, with what it was measured on."""
        config, model, facts = self._loaded.config, self._loaded.model, self._machine.facts
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        return Calibration(
            model=model,
            kv_dtype=resolve_kv_dtype(model, config.kv_cache.dtype),
            gpu=self._loaded.gpu.name,
            timing_version=simserve.__version__,
            decision_version=config.scheduler.compat,
            attention_path=executor_facts.attention_path(facts),
            measured_on=executor_facts.measured_on(facts, collect(), today),
            graphs=self._graphs,
            attention_plan=self._attention_plan,
            designed=_joined(designed),
            traffic=_joined(streams),
            held_out=held_out,
        )


def _joined(groups: Sequence[MeasuredSteps]) -> MeasuredSteps:
    steps = Observations.joined([group.steps for group in groups])
    host_s = np.concatenate([group.host_s for group in groups])
    heat = np.concatenate([group.heat for group in groups])
    return MeasuredSteps(steps, host_s, heat)
