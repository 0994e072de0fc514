"""Hypothesis strategies: small workloads and limits that make everything scarce."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from simserve.cost.formula import FormulaCost
from simserve.types import TraceRequest
from tests.engine.rig import GappedCost, request

__all__ = ["MAX_MODEL_LEN", "limits", "requests"]

MAX_MODEL_LEN = 96
STEP_S = 0.25


@st.composite
def requests(draw: st.DrawFn, distinct: bool = False) -> list[TraceRequest]:
    """Bursts, arrivals in mid-step and exactly at the end of one, shared prompts and outputs."""
    gaps = st.one_of(
        st.just(0.0),
        st.integers(1, 12).map(lambda steps: steps * STEP_S),
        st.floats(0.001, 3.0, allow_nan=False).map(lambda gap: round(gap, 4)),
    )
    arrival_s = 0.0
    made = []
    for i in range(draw(st.integers(1, 12))):
        arrival_s += draw(gaps) + (0.0001 if distinct else 0.0)
        shared = draw(st.integers(0, 40))
        own = draw(st.integers(0 if shared else 1, 24))
        prompt = ((draw(st.sampled_from(["system", "other"])), shared), (f"{i}/own", own))
        output_len = draw(st.integers(1, MAX_MODEL_LEN - shared - own))
        output = draw(st.sampled_from([None, (("spoken", output_len),)]))
        made.append(
            request(
                str(i),
                arrival_s,
                tuple(part for part in prompt if part[1]),
                output_len,
                output=output,
                priority=draw(st.integers(0, 2)),
                cache_salt=draw(st.sampled_from([None, None, None, "a", ""])),
                prompt_logprobs=draw(st.integers(0, 9)) == 0,
            )
        )
    return made


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Options of `rig.build`. The pool always holds the longest request."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    blocks = -(-MAX_MODEL_LEN // block_size)
    chunked = draw(st.booleans())
    budgets = [MAX_MODEL_LEN, 2048] if not chunked else [3, 8, 32, 2048]
    return {
        "block_size": block_size,
        "num_gpu_blocks": 1 + int(blocks * draw(st.sampled_from([1, 1.2, 2, 8]))),
        "enable_prefix_caching": draw(st.booleans()),
        "max_num_batched_tokens": draw(st.sampled_from(budgets)),
        "enable_chunked_prefill": chunked,
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 64])),
        "max_model_len": MAX_MODEL_LEN,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "quirks": draw(st.sampled_from(["as_engine", "fixed"])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "cost": draw(
            st.sampled_from(
                [
                    FormulaCost(STEP_S),
                    FormulaCost(0.01, 2e-5, 1e-7),
                    GappedCost(STEP_S, STEP_S / 4, STEP_S / 8),
                    GappedCost(0.01, 1e-4, 0.03),
                ]
            )
        ),
    }
