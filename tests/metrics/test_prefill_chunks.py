"""Chunks of prompts: in the step tables' own numbers, and complete, preemptions included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import simserve
from simserve.metrics.arrow import column
from simserve.metrics.result import RunResult

CONFIG: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "h200",
    "workload": {
        "synthetic": {
            "num_requests": 60,
            "arrival": {"kind": "poisson", "rate": 20},
            "prompt_len": {"kind": "uniform", "min": 1, "max": 3000},
            "output_len": {"kind": "uniform", "min": 1, "max": 80},
        }
    },
    "scheduler": {"max_num_batched_tokens": 512},
    "metrics": {"plot": False},
}


@pytest.fixture(
    scope="module", params=[{}, {"kv_cache.num_gpu_blocks": 400}], ids=["room", "tight"]
)
def result(request: pytest.FixtureRequest) -> RunResult:
    return simserve.run(CONFIG, request.param)


def test_the_chunks_of_a_step_are_its_prefill_tokens(result: RunResult) -> None:
    tokens = np.zeros(result.steps_table.num_rows, dtype=np.int64)
    for row in result.requests_table.to_pylist():
        for step, count in zip(
            row["prefill_chunk_step"], row["prefill_chunk_num_tokens"], strict=True
        ):
            tokens[step] += count if count > 1 else 0  # one token counts as a decode
    np.testing.assert_array_equal(tokens, column(result.steps_table, "num_prefill_tokens"))


def test_the_chunks_of_a_request_are_its_prompt(result: RunResult) -> None:
    preempted = 0
    for row in result.requests_table.to_pylist():
        computed = sum(row["prefill_chunk_num_tokens"])
        assert row["token_run_first_step"][0] in row["prefill_chunk_step"]
        assert row["prefill_chunk_step"] == sorted(set(row["prefill_chunk_step"]))
        if row["num_preemptions"]:
            preempted += 1
        else:
            assert computed == row["input_length"] - row["cached_tokens"]
    assert bool(preempted) == bool(result.summary_dict["num_preemptions"])


def test_a_last_chunk_of_one_token_begins_a_run_of_decodes() -> None:
    synthetic = {
        "num_requests": 1,
        "prompt_len": {"kind": "constant", "value": 17},
        "output_len": {"kind": "constant", "value": 6},
    }
    overrides = {"scheduler.max_num_batched_tokens": 16, "scheduler.max_num_seqs": 1}
    config = {**CONFIG, "workload": {"synthetic": synthetic}}
    (row,) = simserve.run(config, overrides).requests_table.to_pylist()
    assert row["prefill_chunk_num_tokens"] == [16, 1]
    assert row["prefill_chunk_step"] == [0, 1]
