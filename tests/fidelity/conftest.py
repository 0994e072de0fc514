"""Step logs: small recorded ones, and one written by hand."""

from __future__ import annotations

import copy
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from simserve.fidelity.logs.vllm_log import StepLog, parse_vllm_log, read_vllm_log

LOGS = Path(__file__).parents[1] / "data" / "vllm_logs"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in LOGS.glob("*.json.gz"))

DOCUMENT: dict[str, Any] = {
    "name": "tiny",
    "engine": "vllm-0.20.2",
    "gpu": "NVIDIA H200",
    "model": "llama-3.1-8b shape",
    "config": {
        "budget": 32,
        "threshold": 0,
        "max_num_seqs": 4,
        "block_size": 16,
        "num_free_blocks": 100,
        "prefix_caching": True,
    },
    "requests": [
        {"arrival": 0.001, "segs": [[7, 40]], "out": 2, "added": 1500, "times": [31000, 41100]},
        {"arrival": 0.015, "segs": [[7, 16], [8, 4]], "out": 1, "added": 31050, "times": [41100]},
    ],
    "steps": [
        [2000, 18000, 100, 20, [[0, 32, 0]], []],
        [21000, 10000, 100, 20, [[0, 8, 32]], []],
        [31100, 10000, 110, 30, [[0, 1, 40], [1, 4, 16]], []],
    ],
}
"""Two requests: 40 tokens in steps of 32, and 20 tokens of which the first block is cached."""


@pytest.fixture
def document() -> dict[str, Any]:
    """A log as its file has it, to be spoiled."""
    return copy.deepcopy(DOCUMENT)


@pytest.fixture
def tiny(document: dict[str, Any]) -> StepLog:
    """The log written by hand."""
    return parse_vllm_log(Path("tiny.json.gz"), document)


@pytest.fixture(scope="session")
def warm() -> StepLog:
    """A recorded log of 101 requests in 289 steps."""
    return read_vllm_log(LOGS / "warm.json.gz")


@pytest.fixture(scope="session")
def all_logs() -> list[Path]:
    """The logs in the folder that SIMSERVE_VLLM_LOGS names; skips where it names none."""
    name = os.environ.get("SIMSERVE_VLLM_LOGS")
    if not name:
        pytest.skip("SIMSERVE_VLLM_LOGS names no folder of step logs")
    paths = sorted(Path(name).glob("*.json.gz"))
    if not paths:
        pytest.fail(f"SIMSERVE_VLLM_LOGS is {name}, which holds no *.json.gz")
    return paths


def write(path: Path, document: dict[str, Any]) -> Path:
    """A document as a gzipped file."""
    path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    return path
