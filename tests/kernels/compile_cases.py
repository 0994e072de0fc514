"""Calls of every public kernel function, in which each branch of each kernel is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels import layouts, sampling  # noqa: E402
from simserve_kernels.flash_attention import flash_attention  # noqa: E402
from simserve_kernels.kv_write import kv_write  # noqa: E402
from simserve_kernels.naive_attention import naive_attention  # noqa: E402
from simserve_kernels.norm_rope import rms_norm, rope, silu_mul  # noqa: E402
from simserve_kernels.paged_decode import paged_decode  # noqa: E402
from simserve_kernels.paged_prefill import paged_prefill  # noqa: E402
from simserve_kernels.read_once import read_once  # noqa: E402
from simserve_kernels.rope_write import rope_kv_write  # noqa: E402
from simserve_kernels.sampling_logprobs import store_logprobs  # noqa: E402
from simserve_kernels.sampling_rules import apply_rules  # noqa: E402
from simserve_kernels.sampling_settings import (  # noqa: E402
    RuleColumns,
    SamplingColumns,
    SamplingParams,
    TokenLogprobs,
)

__all__ = ["compile_cases"]

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SCALES = {"k_scale": 0.5, "v_scale": 2.0}


class OnGpu(torch.Tensor):
    """A tensor of the CPU that is taken for one of a GPU where fp8 is unpacked in words."""

    is_cuda = True


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield names and calls; of each kernel the variant first that is worth machine code."""
    for call, variants in CASES.items():
        for variant in variants:
            said = ", ".join(
                f"{name}={str(value).removeprefix('torch.')}" for name, value in variant.items()
            )
            yield f"{call.__name__}({said})", partial(call, **variant)


def index(*shape: int, dtype: Any = torch.int32) -> Any:
    return torch.zeros(shape, dtype=dtype)


def cache(layout: str, dtype: Any, block_size: int, heads: int, head_size: int) -> Any:
    return layouts.allocate_cache(
        layouts.CacheShape(4, block_size, heads, head_size), layout, dtype, "cpu"
    )


def decode(
    *, path: str, layout: str = "nhd", q: Any = BF16, kv: Any = None, block_size: int = 16,
    head: int = 128, heads: tuple[int, int] = (8, 2), num_seqs: int = 3, words: bool = False,
    alibi: bool = False, index_dtype: Any = torch.int32, longest: int = 1024, **options: Any,
) -> None:  # fmt: skip
    query = torch.empty(num_seqs, heads[0], head, dtype=q)
    paged_decode(
        query.as_subclass(OnGpu) if words else query,
        *cache(layout, kv or q, block_size, heads[1], head),
        index(num_seqs, -(-longest // block_size), dtype=index_dtype),
        index(num_seqs, dtype=index_dtype),
        max_seq_len=longest,
        layout=layout,
        path=path,
        alibi_slopes=torch.empty(heads[0]) if alibi else None,
        **options,
    )


def prefill(
    *, layout: str = "nhd", q: Any = BF16, kv: Any = None, block_size: int = 16, head: int = 128,
    heads: tuple[int, int] = (8, 2), longest_query: int = 300, num_seqs: int = 3,
    longest: int = 1024, alibi: bool = False, index_dtype: Any = torch.int32, **options: Any,
) -> None:  # fmt: skip
    paged_prefill(
        torch.empty(longest_query + num_seqs, heads[0], head, dtype=q),
        *cache(layout, kv or q, block_size, heads[1], head),
        index(num_seqs, -(-longest // block_size), dtype=index_dtype),
        index(num_seqs, dtype=index_dtype),
        index(num_seqs + 1, dtype=index_dtype),
        max_query_len=longest_query,
        layout=layout,
        alibi_slopes=torch.empty(heads[0]) if alibi else None,
        **options,
    )


def flash(
    *, dtype: Any = BF16, head: int = 128, heads: tuple[int, int] = (8, 2), num_tokens: int = 300,
    num_seqs: int = 2, alibi: bool = False, index_dtype: Any = torch.int32, **options: Any,
) -> None:  # fmt: skip
    kv = torch.empty(2, num_tokens, heads[1], head, dtype=dtype)
    starts = index(num_seqs + 1, dtype=index_dtype)
    slopes = torch.empty(heads[0]) if alibi else None
    query = torch.empty(num_tokens, heads[0], head, dtype=dtype)
    flash_attention(query, *kv, starts, starts, alibi_slopes=slopes, **options)


def naive(*, dtype: Any = BF16, head: int = 128, causal: bool = True) -> None:
    query, k, v = (torch.empty(100, heads, head, dtype=dtype) for heads in (8, 2, 2))
    naive_attention(query, k, v, causal=causal)


def write(
    *, layout: str = "nhd", k: Any = BF16, kv: Any = None, block_size: int = 16, head: int = 128,
    **scales: float,
) -> None:  # fmt: skip
    keys = torch.empty(5, 2, head, dtype=k)
    caches = cache(layout, kv or k, block_size, 2, head)
    kv_write(keys, keys, *caches, index(5, dtype=torch.int64), layout=layout, **scales)


def rotate_write(
    *, layout: str = "nhd", k: Any = BF16, kv: Any = None, block_size: int = 16, head: int = 128,
    rotated: int = 128, **scales: float,
) -> None:  # fmt: skip
    keys, caches = torch.empty(5, 2, head, dtype=k), cache(layout, kv or k, block_size, 2, head)
    rope_kv_write(
        torch.empty(5, 8, head, dtype=k), keys, keys, index(5, dtype=torch.int64),
        torch.empty(9, rotated), *caches, index(5, dtype=torch.int64), layout=layout, **scales,
    )  # fmt: skip


def rotate(*, dtype: Any = BF16, head: int = 128, rotated: int = 128) -> None:
    q, k = (torch.empty(5, heads, head, dtype=dtype) for heads in (8, 2))
    rope(q, k, index(5, dtype=torch.int64), torch.empty(9, rotated))


def norm(*, dtype: Any = BF16, shape: tuple[int, ...] = (5, 4096), residual: bool = False) -> None:
    x = torch.empty(shape, dtype=dtype)
    rms_norm(x, x.reshape(-1)[: shape[-1]], 1e-6, residual=x.clone() if residual else None)


def gate(*, dtype: Any = BF16, size: int = 4096) -> None:
    silu_mul(torch.empty(5, 2 * size, dtype=dtype))


def read(*, dtype: Any = BF16) -> None:
    read_once(torch.empty(4096, dtype=dtype), run=2048, tile=1024, num_warps=4)


def draw(*, rows: list[dict[str, float]], dtype: Any = BF16, vocab: int = 5000) -> None:
    params = [SamplingParams(seed=1, **row) for row in rows]
    columns = SamplingColumns.of(params, [0] * len(params), "cpu")
    sampling.sample(torch.empty(len(params), vocab, dtype=dtype), columns)


def log(*, dtype: Any = BF16, vocab: int = 5000) -> None:
    out = TokenLogprobs(index(3, 6), index(3, 6, dtype=F32), index(3))
    tokens = index(3, dtype=torch.int64)
    store_logprobs(out, torch.empty(3, vocab, dtype=dtype), tokens, index(3))


def rule(*, dtype: Any = F32, vocab: int = 5000, before: int = 2, entries: int = 20) -> None:
    floats = index(4, dtype=F32)
    columns = RuleColumns(
        has_entries=index(4),
        has_tokens=index(4),
        entry_tokens=index(4, entries),
        entry_values=index(4, entries, dtype=F32),
        entry_since=index(4, entries),
        entry_until=index(4, entries),
        entry_before=index(4, entries, before) if before else None,
        allowed=index(4, -(-vocab // 32)) if before else None,
        counts=index(4, vocab),
        presence=floats,
        frequency=floats,
        repetition=floats,
    )
    places = index(3, dtype=torch.int64)
    apply_rules(torch.empty(3, vocab, dtype=dtype), columns, places, places, index(4, 99))


CASES: dict[Callable[..., None], list[dict[str, Any]]] = {
    write: [
        {},
        {"layout": "packed", "k": F16, "block_size": 256, "head": 80},
        {"kv": FP8, "block_size": 1, **SCALES},
        {"layout": "packed", "k": F32, "kv": FP8, "block_size": 48, "head": 256},
    ],
    rotate_write: [
        {},
        {"layout": "packed", "k": F16, "block_size": 5, "rotated": 32},
        {"kv": FP8, "head": 80, "rotated": 80, "block_size": 256, **SCALES},
        {"layout": "packed", "k": F32, "kv": FP8, "head": 64, "rotated": 32, "block_size": 1},
    ],
    rotate: [
        {},
        {"dtype": F16, "head": 80, "rotated": 32},
        {"dtype": F32, "head": 64, "rotated": 64},
    ],
    norm: [
        {"residual": True},
        {"dtype": F16, "shape": (5, 8, 128)},
        {"dtype": F32, "shape": (5, 80)},
    ],
    gate: [{}, {"dtype": F16, "size": 100}, {"dtype": F32}],
    read: [{}, {"dtype": F32}],
    naive: [{}, {"dtype": F16, "head": 80, "causal": False}, {"dtype": F32}],
    decode: [
        {"path": "auto", "kv": FP8, "words": True, "sliding_window": 100, **SCALES},
        {"path": "auto"},
        {"path": "auto", "layout": "packed", "q": F16, "alibi": True, "block_size": 256},
        {"path": "auto", "kv": FP8, "soft_cap": 30.0, "head": 80, "block_size": 48, "num_seqs": 1},
        {"path": "auto", "q": F32, "head": 256, "sliding_window": 9, "block_size": 1},
        {"path": "auto", "q": F32, "layout": "packed", "kv": FP8, "alibi": True, "soft_cap": 9.0,
         "index_dtype": torch.int64, "heads": (3, 3), "block_size": 5},
        {"path": "v1"},
        {"path": "v1", "q": F32, "alibi": True, "head": 80, "block_size": 1,
         "index_dtype": torch.int64},
        {"path": "v2", "layout": "packed", "kv": FP8, "soft_cap": 30.0, "alibi": True, **SCALES},
        {"path": "v2", "kv": FP8, "words": True, "soft_cap": 9.0, "head": 192,
         "sliding_window": 700, "block_size": 48},
    ],
    prefill: [
        {},
        {"longest_query": 1},
        {"layout": "packed", "num_seqs": 1},
        {"layout": "packed", "q": F16, "kv": FP8, "soft_cap": 30.0, "block_size": 256,
         "num_seqs": 1, **SCALES},
        {"sliding_window": 100, "block_size": 1, "num_seqs": 20, "index_dtype": torch.int64},
        {"kv": FP8, "alibi": True, "block_size": 48, "head": 80, "num_seqs": 1},
        {"q": F32, "sliding_window": 9, "soft_cap": 9.0, "alibi": True, "block_size": 48,
         "num_seqs": 1},
        {"q": F32, "layout": "packed", "kv": FP8, "head": 256, "block_size": 5, "num_seqs": 1},
        {"layout": "packed", "longest_query": 4, "head": 256, "sliding_window": 9, "block_size": 8},
    ],
    flash: [
        {},
        {"causal": False, "dtype": F16, "head": 80},
        {"sliding_window": 100, "soft_cap": 30.0, "num_tokens": 9000, "num_seqs": 1},
        {"dtype": F32, "alibi": True, "index_dtype": torch.int64, "num_tokens": 20},
        {"dtype": F32, "head": 256, "causal": False, "sliding_window": 9},
    ],
    draw: [
        {"rows": [{"top_k": 50, "top_p": 0.9}, {"temperature": 0.0, "min_p": 0.1}]},
        {"rows": [{"temperature": 0.0}]},
        {"rows": [{}], "dtype": F16},
        {"rows": [{"top_k": 50}], "dtype": F32},
        {"rows": [{"top_p": 0.9}]},
        {"rows": [{"min_p": 0.1}, {"temperature": 0.0}], "dtype": F32},
    ],
    log: [{}, {"dtype": F32, "vocab": 97}],
    rule: [{}, {"dtype": BF16, "before": 0}],
}  # fmt: skip
