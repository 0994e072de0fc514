"""Which points of the studies run on a GPU, made short enough for one sitting.

Each part names a configuration of configs/studies, what is changed in all its points, and which
points are taken. The same changes make the simulated twin that stands beside a measured cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simserve.config.sweep_loader import Point, load_points, load_sweep

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "studies"
BUDGET = "scheduler.max_num_batched_tokens"
THRESHOLD = "scheduler.long_prefill_token_threshold"
MAX_NUM_SEQS = "scheduler.max_num_seqs"
NUM_GPU_BLOCKS = "kv_cache.num_gpu_blocks"
BLOCK_SIZE = "kv_cache.block_size"
RATE = "workload.synthetic.arrival.rate"

MACHINE = {
    MAX_NUM_SEQS: 64,
    BUDGET: 34816,
    "scheduler.max_model_len": 36864,
    NUM_GPU_BLOCKS: 17001,
}
"""Limits of the machine that all cells with blocks of 16 share; none of them meets one. Its pool,
272,000 tokens, also holds the batches of the study of decode kernels."""
CELLS_HAVE = (f"{MAX_NUM_SEQS}=64",)
"""No cell runs as many, but for those that sweep it."""

Keep = Callable[[str | None, Mapping[str, Any]], bool]


class Part(NamedTuple):
    """Points of one configuration."""

    config: str
    overrides: tuple[str, ...] = ()
    keep: Keep = lambda scenario, values: True
    times: int = 1
    """How often each point runs."""


def constant(key: str, value: int) -> str:
    return f"workload.synthetic.{key}={{kind: constant, value: {value}}}"


def lognormal(key: str, mean: int, most: int) -> str:
    text = f"{{kind: lognormal, mean: {mean}, sigma: 0.6, min: 16, max: {most}}}"
    return f"workload.synthetic.{key}={text}"


PARTS = (
    Part("long_prefill_budget"),
    Part("long_prefill_threshold", keep=lambda scenario, values: values[THRESHOLD] > 0),
    Part("long_prefill_labels"),
    Part("prefix_cache", times=3),
    Part(
        "long_context_documents",
        ("workload.synthetic.num_requests=2", constant("output_len", 32)),
    ),
    Part(
        "long_context_turns",
        (
            constant("prompt_len", 8000),
            constant("output_len", 32),
            "workload.synthetic.sessions.turns={kind: constant, value: 4}",
        ),
    ),
    Part("template_salts"),
    Part(
        "template_order",
        keep=lambda scenario, values: (
            values[NUM_GPU_BLOCKS] == 600 or scenario in ("four salts", "four interleaved")
        ),
    ),
    Part(
        "pressure",
        (
            "workload.synthetic.num_requests=80",
            "workload.synthetic.arrival.rate=60",
            lognormal("output_len", 200, 400),
        ),
        lambda scenario, values: (
            (values[MAX_NUM_SEQS] <= 64 and values[NUM_GPU_BLOCKS] == 1500)
            or (values[MAX_NUM_SEQS], values[NUM_GPU_BLOCKS]) == (64, 6000)
        ),
    ),
    Part(
        "allocator",
        ("workload.synthetic.num_requests=60", lognormal("output_len", 100, 200)),
        lambda scenario, values: values[RATE] in (16, 32),
    ),
    Part(
        "block_size",
        ("workload.synthetic.num_requests=60", lognormal("output_len", 60, 200)),
        lambda scenario, values: values[BLOCK_SIZE] in (16, 64, 256),
    ),
    Part(
        "parallel",
        (constant("output_len", 64),),
        lambda scenario, values: (
            scenario != "answers end early" and values["workload.decoding.n"] in (1, 4)
        ),
    ),
    Part(
        "beam_search",
        keep=lambda scenario, values: (
            scenario in ("one at a time", "without prefix cache", "four at once")
            and values["workload.decoding.beam_width"] in (1, 4)
        ),
    ),
)
"""In the order in which they run; what the time does not suffice for is at the end."""


class Cell(NamedTuple):
    """One run on the GPU."""

    name: str
    part: Part
    point: Point

    @property
    def block_size(self) -> int:
        loaded = self.point.loaded
        assert loaded is not None
        return loaded.config.kv_cache.block_size


def swept_keys(part: Part) -> list[str]:
    """The dotted keys that differ between the points of a part's configuration."""
    return load_sweep(CONFIGS / f"{part.config}.yaml").keys


def cells(part: Part, overrides: Sequence[str]) -> Iterator[Cell]:
    """The cells of a part under further overrides, such as those of the executor."""
    swept = swept_keys(part)
    common = [one for one in CELLS_HAVE if one.partition("=")[0] not in swept]
    changed = [*common, *part.overrides, *overrides]
    for point in load_points(load_sweep(CONFIGS / f"{part.config}.yaml", changed)):
        if part.keep(point.scenario, point.values):
            for time in range(part.times):
                again = f"#{time + 1}" if part.times > 1 else ""
                yield Cell(f"{part.config}/{point.name}{again}", part, point)
