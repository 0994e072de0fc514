"""How much KV requests have together is in every step's row."""

from __future__ import annotations

from typing import Any

import pytest

from simserve.config.build import build
from simserve.config.loader import load_config
from simserve.engine.simulation import simulate
from simserve.metrics.tables import steps_table


def steps_of(num_requests: int, leap: bool, **kv_cache: Any) -> Any:
    """The steps of prompts of 80 tokens, the first 48 of which are the same, two at a time."""
    source = {
        "model": "llama-3.1-8b",
        "scheduler": {"max_num_seqs": 2},
        "kv_cache": {"num_gpu_blocks": 100, "block_size": 16, **kv_cache},
        "workload": {
            "synthetic": {
                "num_requests": num_requests,
                "arrival": {"kind": "immediate"},
                "prompt_len": {"kind": "constant", "value": 32},
                "output_len": {"kind": "constant", "value": 10},
                "shared_prefix": {"num_groups": 1, "prefix_len": {"kind": "constant", "value": 48}},
            }
        },
    }
    parts = build(load_config(source), 0, leap=leap).parts
    simulate(parts)
    return steps_table(parts.recorder.data())


@pytest.mark.parametrize("leap", [True, False])
def test_a_block_counts_once_for_all_but_one_of_its_requests(leap: bool) -> None:
    steps = steps_of(3, leap)
    assert steps["num_running"].to_pylist() == [2] * 10 + [1] * 10
    assert steps["num_shared_kv_tokens"].to_pylist() == [48] * 10 + [0] * 10


def test_without_a_prefix_cache_nothing_is_said() -> None:
    steps = steps_of(2, True, enable_prefix_caching=False)
    assert set(steps["num_shared_kv_tokens"].to_pylist()) == {None}
