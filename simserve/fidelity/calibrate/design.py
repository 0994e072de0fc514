"""Which steps and which traffic a calibration measures: the regimes that serving meets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from simserve.executor.real.bench.step_cases import RequestShape, StepCase, parse_step_case

__all__ = ["Limits", "design", "num_rest_steps", "traffic"]

_BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 44, 64, 96, 128, 180, 256)
"""Numbers of decodes; 6, 12, 44 and 180 are padded to the next graph."""
_CONTEXTS = (64, 2048, 8192, 32000)
_PROMPTS = (16, 32, *range(64, 2049, 64), 3072, 4096, 6144, 8192)
"""Up to 2,048 each size that a graph is captured for: products of some take longer than others."""
_SEVERAL_PROMPTS = ("4*64", "4*128", "4*512", "8*256", "16*512")
_CHUNKS = (64, 256, 512, 1024, 2048)
_CHUNK_STARTS = (2048, 8192, 30720)
_UNLIKE = ("4*1@8192,28*1@256", "8*1@8192,56*1@512", "16*1@4096,112*1@256")
_UNLIKE_IN_TURNS = (
    *(("1@8192,7*1@256", 4), ("1@8192,7*1@512", 8), ("1@4096,7*1@256", 16)),
    *(("1@4096,11*1@512", 2), ("11*1@512,1@4096", 4)),
)
"""So often each. Kernels take requests in the order of the batch: long ones may stand anywhere."""
_EVERY_BATCH_CONTEXT = 512
"""Of as many decodes as each graph takes: their products differ as those of prompts do."""
_SHARED = (
    *("8*1@1024~512", "16*1@1024~512", "24*1@1024~768", "64*1@1024~512", "128*1@1024~768"),
    *("256*1@768~512", "12*1@8192~4096", "32*1@4096~3072", "64*1@4096~2048"),
    *("6*1@640~512,6*1@900~512,6*1@1200~512,6*1@1500~512", "16*1@700~256,16*1@1500~1024"),
    *("24*1@1024~512,384", "64*1@2048~1024,128", "12*1@4096~2048,960"),
    "23*1@1500~1024,4*120@1024~1024",
)
"""Of requests that have a system prompt or a document together."""
_MIXED_DECODES = ("1@512", "8*1@1500", "32*1@2048", "200*1@512", "23*1@512,1@5000,23*1@512,1@5000")
_MIXED_PROMPTS = (
    *("32", "128", "384", "960", "1984", "4*120"),
    *("448@4096", "512@2048", "512@6144,128", "1984@8192"),
)

_NUM_DRAWN_DECODES, _NUM_DRAWN_MIXED = 30, 50
"""Batches as service makes them, of unlike requests: drawn once, the same for every machine."""
_MOST_DECODES, _LONGEST_CONTEXT, _MOST_NEW = 256, 16_000, 1500
_MEDIAN_CONTEXTS = 100, 4000
_SPREADS = 0.2, 1.2

_NUM_REST_STEPS = 2
_LEAST_WITHOUT_REST = 1024
"""Tokens. Larger steps follow one another in service too: they are what is queued, or of one
prompt."""

_CONCURRENCIES = (4, 96, 12, 64, 24, 96, 4, 64, 24, 12)
"""Each at two times: the host's speed changes, and a slow host with many requests would look like
one that takes long for each."""
_HELD_OUT_CONCURRENCY = 48


class Limits(NamedTuple):
    """What a step may be on a machine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_kv_tokens: int
    """Tokens for which the pool has blocks."""
    block_size: int


def design(limits: Limits, num_steps: int) -> list[StepCase]:
    """Decodes, prompts, chunks and mixed batches that fit, each run for `num_steps` steps and their
    rests."""
    cases = [parse_step_case(text) for text in _shapes()]
    cases += _drawn(np.random.default_rng(0))
    return [case for case in cases if _fits(case, limits, num_steps)]


def num_rest_steps(case: StepCase) -> int:
    """How many steps of decodes run before each step of a case.

    Under prompts that follow one another the GPU's clock falls, within some 50 ms and by up to a
    tenth. Most steps with prompts in service follow decodes.
    """
    has_prompts = any(request.num_new_tokens > 1 for request in case.requests)
    return _NUM_REST_STEPS if has_prompts and case.num_tokens < _LEAST_WITHOUT_REST else 0


def _shapes() -> Iterator[str]:
    for batch, context in product(_BATCHES, _CONTEXTS):
        yield f"{batch}*1@{context}"
    for batch in sorted({*_BATCHES, *range(8, _MOST_DECODES + 1, 8)}):
        yield f"{batch}*1@{_EVERY_BATCH_CONTEXT}"
    yield from _UNLIKE
    yield from (",".join([requests] * times) for requests, times in _UNLIKE_IN_TURNS)
    yield from _SHARED
    yield from map(str, _PROMPTS)
    yield from _SEVERAL_PROMPTS
    for chunk, start in product(_CHUNKS, _CHUNK_STARTS):
        yield f"{chunk}@{start}"
    for decodes, prompts in product(_MIXED_DECODES, _MIXED_PROMPTS):
        yield f"{decodes},{prompts}"


def _drawn(rng: np.random.Generator) -> Iterator[StepCase]:
    for _ in range(_NUM_DRAWN_DECODES):
        yield StepCase("decodes", _drawn_decodes(rng, _MOST_DECODES))
    for _ in range(_NUM_DRAWN_MIXED):
        decodes, prompts = _drawn_decodes(rng, _MOST_DECODES // 2), _drawn_prompts(rng)
        yield StepCase("mixed", (*decodes, *prompts))


def _drawn_decodes(rng: np.random.Generator, most: int) -> tuple[RequestShape, ...]:
    """From few to many, of lognormal contexts about some median."""
    number, median = _log_uniform(rng, 2, most), _log_uniform(rng, *_MEDIAN_CONTEXTS)
    contexts = rng.lognormal(np.log(median), rng.uniform(*_SPREADS), number)
    return tuple(RequestShape(1, min(int(one), _LONGEST_CONTEXT)) for one in contexts + 1)


def _drawn_prompts(rng: np.random.Generator) -> tuple[RequestShape, ...]:
    """A prompt, a chunk of one, or several short ones."""
    kind = rng.integers(3)
    if kind == 2:
        number = int(rng.integers(2, 6))
        new = (_log_uniform(rng, 8, _MOST_NEW // number) for _ in range(number))
        return tuple(RequestShape(one, 0) for one in new)
    start = _log_uniform(rng, 64, _LONGEST_CONTEXT) if kind == 1 else 0
    return (RequestShape(_log_uniform(rng, 8, _MOST_NEW), start),)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def _fits(case: StepCase, limits: Limits, num_steps: int) -> bool:
    rest = num_rest_steps(case)
    block, extra = limits.block_size, num_steps * (1 + rest)
    lengths = [request.num_tokens + extra for request in case.requests]
    beside = 2 * extra + block if rest else 0  # a decode of its own
    return (
        len(case.requests) <= limits.max_num_seqs
        and case.num_tokens <= limits.max_num_batched_tokens
        and max(lengths) <= limits.max_model_len
        and sum(-(-length // block) * block for length in lengths) + beside <= limits.num_kv_tokens
    )


def traffic(limits: Limits) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Workloads to fit on, and one that is held out: closed loops of so many requests at a time.

    Closed loops need no arrival rate, which would depend on how fast the machine is.
    """
    fitted = [_loop(min(number, limits.max_num_seqs), limits) for number in _CONCURRENCIES]
    return fitted, _loop(min(_HELD_OUT_CONCURRENCY, limits.max_num_seqs), limits)


def _loop(concurrency: int, limits: Limits) -> dict[str, object]:
    longest = limits.max_model_len
    prompt = {"kind": "lognormal", "mean": min(600, longest // 8), "sigma": 1.0}
    output = {"kind": "lognormal", "mean": min(100, longest // 16), "sigma": 0.7}
    return {
        "synthetic": {
            "num_requests": 12 * concurrency,
            "prompt_len": {**prompt, "min": 2, "max": min(4096, longest // 2)},
            "output_len": {**output, "min": 1, "max": min(1024, longest // 4)},
        },
        "max_concurrency": concurrency,
    }
