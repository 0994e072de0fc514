"""Step logs made up from known coefficients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simserve.cost.step_work import NO_FACTORS, SizeFactors
from simserve.fidelity.fit.host import engine_seconds
from simserve.fidelity.fit.profile import VLLM_GRAPHS
from simserve.fidelity.fit.step import predict
from simserve.fidelity.logs.loaded_log import LoadedLog
from simserve.fidelity.logs.observations import Observations

Counts = NDArray[np.int64]


def synthetic_log(
    coefficients: Mapping[str, float],
    *,
    name: str,
    model: str = "llama-3.1-8b",
    num_steps: int = 300,
    host_scale: float = 1.0,
    seed: int = 0,
    size_factors: SizeFactors = NO_FACTORS,
) -> LoadedLog:
    """A log of steps of all regimes that take exactly what the coefficients say."""
    rng = np.random.default_rng([seed, num_steps])
    log = LoadedLog(name, name, "made-up-1", model, "h200", _steps(rng, num_steps))
    c, steps, sheet = coefficients, log.steps, log.sheet
    update_s = c["update_step_s"] + c["update_request_s"] * steps.num_reqs
    intake_s = c["intake_first_s"] * np.minimum(steps.gap_requests, 1)
    intake_s = intake_s + c["intake_request_s"] * steps.gap_requests
    intake_s = intake_s + c["intake_token_s"] * steps.gap_tokens
    gap_s = c["loop_step_s"] + c["loop_request_s"] * steps.num_reqs + intake_s
    steps = replace(
        steps,
        duration_s=predict(c, sheet, steps, VLLM_GRAPHS, host_scale, size_factors),
        schedule_s=host_scale * (engine_seconds(c, steps) - update_s),
        update_s=host_scale * update_s,
        gap_s=host_scale * gap_s,
    )
    return replace(log, steps=steps)


def _steps(rng: np.random.Generator, num_steps: int) -> Observations:
    """Steps of decodes, of prefills and of both, in equal shares."""
    kind = rng.integers(0, 3, num_steps)
    rows = [_step(rng, with_decodes=k != 1, with_prefills=k != 0) for k in kind]
    names = (
        "num_decodes",
        "decode_kv_tokens",
        "decode_kv_bound",
        "num_prefills",
        "prefill_tokens",
        "prefill_pairs",
        "prefill_kv_tokens",
        "longest_kv_tokens",
        "num_new",
        "num_table_tokens",
        "gap_requests",
        "gap_tokens",
    )
    columns: dict[str, Counts] = dict(zip(names, np.array(rows, dtype=np.int64).T, strict=True))
    later = np.zeros(num_steps)
    return Observations(
        duration_s=later,
        schedule_s=later,
        update_s=later,
        gap_s=later,
        num_tokens=columns["num_decodes"] + columns["prefill_tokens"],
        num_reqs=columns["num_decodes"] + columns["num_prefills"],
        shared_kv_tokens=np.zeros(num_steps, dtype=np.int64),
        **columns,
    )


def _step(rng: np.random.Generator, with_decodes: bool, with_prefills: bool) -> list[int]:
    num_decodes = int(2 ** rng.uniform(0, 8)) if with_decodes else 0
    unlike = rng.random() < 0.7
    contexts = (2 ** rng.uniform(4, 14, num_decodes if unlike else 1)).astype(int)
    contexts = contexts if unlike else np.repeat(contexts, num_decodes)
    longest = int(contexts.max()) if num_decodes else 0
    num_prefills = int(rng.integers(1, 6)) if with_prefills else 0
    n = (2 ** rng.uniform(1, 13, num_prefills)).astype(int)
    start = (rng.random(num_prefills) < 0.5) * (2 ** rng.uniform(0, 14, num_prefills)).astype(int)
    new = rng.random(num_prefills) < 0.6
    taken_in = int(rng.integers(0, 3))
    return [
        num_decodes,
        int(contexts.sum()) if num_decodes else 0,
        max(num_decodes * longest, 1),
        num_prefills,
        int(n.sum()),
        int((n * start + n * (n + 1) // 2).sum()),
        int((n + start).sum()),
        max(longest, int((n + start).max())) if with_prefills else 0,
        int(new.sum()),
        int(((n + start) * new).sum()),
        taken_in,
        taken_in * int(rng.integers(1, 2000)),
    ]
