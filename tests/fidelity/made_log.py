"""Step logs made by a simulation: what a cost model must then find again exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simserve.executor.simulated import SimulatedExecutor
from simserve.fidelity.logs.vllm_log import StepLog, parse_vllm_log
from simserve.fidelity.replay.log_run import simulate_log
from simserve.protocols import CostModel, Price
from simserve.types import StepOutput, StepPlan, StepRun, TraceRequest

__all__ = ["HostCost", "made_log", "poisson"]


class HostCost:
    """Tokens take GPU time; schedule(), update() and the loop take host time."""

    def __init__(self, host_scale: float = 1.0, gpu_scale: float = 1.0) -> None:
        self._host_scale = host_scale
        self._gpu_scale = gpu_scale

    def price(self, run: StepRun) -> Price:
        num_tokens, num_reqs = run.plan.total_num_tokens, len(run.plan.request_ids)
        parts = {
            "schedule_s": self._host_scale * (200e-6 + 20e-6 * num_reqs),
            "linear_s": self._gpu_scale * (4e-3 + 20e-6 * num_tokens),
            "update_s": self._host_scale * (100e-6 + 10e-6 * num_reqs),
        }
        columns = {name: np.full(run.count, seconds) for name, seconds in parts.items()}
        return Price(np.full(run.count, sum(parts.values())), columns)

    def after_step_s(self, plan: StepPlan) -> float:
        return self._host_scale * 20e-6

    def take_in_s(self, request: TraceRequest, first: bool) -> float:
        return self._host_scale * (300e-6 + 1e-6 * request.prompt_len)


class _Plans:
    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def scheduled(self, plan: StepPlan, now_s: float) -> None:
        self.plans.append(plan)

    def updated(self, plan: StepPlan, output: StepOutput, now_s: float) -> None: ...

    def reset(self, succeeded: bool, now_s: float) -> None: ...


def poisson(
    count: int, rate: float, seed: int = 0, output_len: int = 20
) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, output tokens) of some requests."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1.0 / rate, count))
    prompts = rng.integers(50, 900, count)
    return [
        (round(float(t), 6), int(n), output_len) for t, n in zip(arrivals_s, prompts, strict=True)
    ]


def made_log(
    requests: Sequence[tuple[float, int, int]],
    cost: CostModel,
    *,
    name: str = "made",
    num_free_blocks: int = 4000,
    **config: Any,
) -> StepLog:
    """The log of a simulation of requests (arrival, prompt tokens, output tokens).

    With `policy="priority"`, later requests come first.
    """
    document: dict[str, Any] = {
        "name": name,
        "engine": "vllm-0.20.2",
        "gpu": "NVIDIA H200",
        "model": "llama-3.1-8b shape",
        "config": {"budget": 1024, "threshold": 0, "max_num_seqs": 64, "block_size": 16,
                   "num_free_blocks": num_free_blocks, **config},
        "requests": [
            {"arrival": t, "segs": [[i, n]], "out": out, "added": round(t * 1e6) + 1,
             "times": [], "priority": -i}
            for i, (t, n, out) in enumerate(requests)
        ],
        "steps": [[10**12, 3, 1, 1, [[0, 1, 0]], []]],
    }  # fmt: skip
    observer = _Plans()
    data = simulate_log(parse_vllm_log(Path(name), document), SimulatedExecutor(cost), observer)
    offsets, firsts = data.times.offsets, data.times.firsts
    for row, request_id in enumerate(data.requests.request_ids):
        runs = range(offsets[row], offsets[row + 1])
        steps = [firsts[run] + k for run in runs for k in range(data.times.counts[run])]
        entry = document["requests"][int(request_id)]
        entry["added"] = _us(data.requests.queued_s[row])
        entry["times"] = [_us(data.steps.end_s[step]) for step in steps]
    document["steps"] = []
    for step, plan in enumerate(observer.plans):
        start_s, end_s = data.steps.start_s[step], data.steps.end_s[step]
        parts = cost.price(StepRun(plan)).parts
        rows = zip(map(int, plan.request_ids), plan.num_tokens, plan.starts, strict=True)
        document["steps"].append(
            [_us(start_s), _us(end_s) - _us(start_s), _us(parts["schedule_s"][0]),
             _us(parts["update_s"][0]), [list(row) for row in rows],
             [int(i) for i in plan.preempted_ids]]
        )  # fmt: skip
    return parse_vllm_log(Path(f"{name}.json.gz"), document)


def _us(seconds: float) -> int:
    return round(float(seconds) * 1e6)
