"""What an allocator tells of itself is recorded for every step, however steps are planned."""

from __future__ import annotations

from typing import Any

import pytest

import simserve

CONFIG: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "workload": {"synthetic": {"num_requests": 1, "prompt_len": 10, "output_len": 3}},
    "scheduler": {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4},
    "kv_cache": {
        "allocator": "contiguous",
        "num_gpu_blocks": 9,
        "enable_prefix_caching": False,
    },
    "executor": {"cost": {"kind": "formula", "base_s": 1}},
    "metrics": {"plot": False},
}


@pytest.mark.parametrize(
    ("ahead", "unused"),
    [(False, [54, 53, 52]), (True, [54, 53, 52, 51])],
    ids=["one step", "planned ahead"],
)
def test_fragmentation_after_each_schedule(ahead: bool, unused: list[int]) -> None:
    """Of a region of 64 tokens; planned ahead, there is a step more, whose token is dropped."""
    result = simserve.run(CONFIG, [f"scheduler.async_scheduling={str(ahead).lower()}"])
    steps = result.steps_table
    assert steps["kv.reserved_unused_tokens"].to_pylist() == unused
    assert steps["kv.unusable_free_tokens"].to_pylist() == [0] * len(unused)
    mean = sum(unused) / len(unused)
    assert result.summary_dict["mean_reserved_unused_tokens"] == mean
