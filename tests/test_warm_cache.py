"""A prefix cache that is warm when the measured run begins."""

from __future__ import annotations

from typing import Any

import pytest

from simserve import api
from simserve.errors import ConfigError

BLOCK = 16


def run(at_start: str, **kv_cache: Any) -> api.RunResult:
    return api.run(
        {
            "model": "llama-3.1-8b",
            "workload": {
                "synthetic": {
                    "num_requests": 40,
                    "arrival": {"kind": "poisson", "rate": 20},
                    "prompt_len": {"kind": "uniform", "min": 1, "max": 900},
                    "output_len": {"kind": "uniform", "min": 2, "max": 40},
                }
            },
            "kv_cache": {"prefix_cache_at_start": at_start, **kv_cache},
        }
    )


def test_every_full_block_of_the_same_prompts_is_found() -> None:
    empty, warm = run("empty"), run("warm")
    lengths = warm.requests_table["input_length"].to_pylist()
    found = warm.requests_table["cached_tokens"].to_pylist()
    assert found == [(length - 1) // BLOCK * BLOCK for length in lengths]
    assert sum(empty.requests_table["cached_tokens"].to_pylist()) == 0
    assert warm.summary_dict["prefix_cache_at_start"] == "warm"
    assert warm.summary_dict["mean_ttft_ms"] < empty.summary_dict["mean_ttft_ms"]
    assert warm.summary_dict["completed"] == 40


def test_only_the_measured_pass_is_counted() -> None:
    warm = run("warm", num_gpu_blocks=150)
    assert warm.steps_table["evicted_cached_blocks"].to_pylist()[0] < 150
    assert warm.requests_table.num_rows == 40
    assert warm.requests_table["arrival_time_s"].to_pylist() == (
        run("empty").requests_table["arrival_time_s"].to_pylist()
    )
    assert run("warm", num_gpu_blocks=150).summary_dict == warm.summary_dict


def test_there_must_be_a_cache() -> None:
    with pytest.raises(ConfigError, match="there is no cache"):
        run("warm", enable_prefix_caching=False)
