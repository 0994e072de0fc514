"""Time the prefill, flash and naive attention kernels on a CUDA GPU; write JSON with raw samples.

    python benchmarks/kernels_prefill.py [--cases prefill_8192 ...] [--tiles 128,64,8,4 ...]
        [--layouts nhd packed] [--json benchmarks/results/kernels_prefill.json]

One layer of 32 query and 8 K/V heads of 128, bfloat16, blocks of 16 in random order. Each case has
rotated copies of its inputs, so that at least 256 MiB of K and V pass before a copy is read again;
all copies are captured in one CUDA graph, and a sample is one replay over its calls. FLOPs: 4 ·
heads · head size for each pair of a query and a key that it sees. Percentages are of an 8192³
matrix product timed in the same run. Every case is checked against float64 on its last rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from simserve.config.environment import collect
from simserve_kernels import reference
from simserve_kernels.attention_tile import Tile
from simserve_kernels.flash_attention import flash_attention
from simserve_kernels.layouts import CacheLayout, CacheShape, allocate_cache
from simserve_kernels.naive_attention import naive_attention, traffic
from simserve_kernels.paged_prefill import paged_prefill

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
ROTATED_BYTES = 256 << 20
MIXED = [(1, 2048)] * 64
PAGED: dict[str, list[tuple[int, int]]] = {  # (queries, tokens) of each sequence
    "prefill_2048": [(2048, 2048)],
    "prefill_8192": [(8192, 8192)],
    "prefill_32768": [(32768, 32768)],
    "prefill_16x512": [(512, 512)] * 16,
    "chunk_2048_at_8192": [(2048, 10240)],
    "chunk_2048_at_30720": [(2048, 32768)],
    "mixed_64x2048_1984_at_0": [*MIXED, (1984, 1984)],
    "mixed_64x2048_1984_at_8192": [*MIXED, (1984, 10176)],
    "verify_64x2048_k3": [(4, 2048)] * 64,
    "decode_64x2048": MIXED,
}
DENSE = {"dense_2048": (2048, 2048), "dense_8192": (8192, 8192), "dense_decode_8192": (1, 8192)}
Call = Callable[[], object]


def time_graph(calls: list[Call], samples: int = 9) -> list[float]:
    """Microseconds a call, of `samples` replays of one graph of all calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return times


def matmul_tflops() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = time_graph([lambda: torch.mm(a, b)] * 10)
    return 2 * 8192**3 / statistics.median(times) / 1e6


def paged_inputs(seqs: list[tuple[int, int]], layout: CacheLayout) -> tuple[torch.Tensor, ...]:
    blocks = [-(-tokens // BLOCK_SIZE) for _, tokens in seqs]
    shape = CacheShape(sum(blocks), BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    cache = allocate_cache(shape, layout, torch.bfloat16, "cuda")
    for part in cache:
        part.normal_()
    order = torch.randperm(sum(blocks), device="cuda", dtype=torch.int32)
    table = torch.zeros(len(seqs), max(blocks), device="cuda", dtype=torch.int32)
    for row, part in enumerate(order.split(blocks)):
        table[row, : len(part)] = part
    lens = torch.tensor([tokens for _, tokens in seqs], device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, *(n for n, _ in seqs)], device="cuda").cumsum(0).int()
    num_tokens = sum(queries for queries, _ in seqs)
    q = torch.randn(num_tokens, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    return q, *cache, table, lens, starts


def relative_error(
    out: torch.Tensor, inputs: tuple[torch.Tensor, ...], layout: CacheLayout
) -> float:
    """Of the last (up to 4) queries of the first and the last sequence."""
    q, k, v, table, lens, starts = inputs
    worst = 0.0
    for row in {0, len(lens) - 1}:
        token = torch.arange(int(lens[row]), device="cuda")
        slots = table[row, token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
        keys, values = reference.gather_kv(k, v, layout, slots)
        end = int(starts[row + 1])
        rows = slice(max(int(starts[row]), end - 4), end)
        expected = reference.attention(q[rows], keys, values)
        error = float((out[rows].double() - expected).norm() / expected.norm())
        worst = error if not error <= worst else worst
    return worst


def result(name: str, times: list[float], flops: int, peak: float, **more: Any) -> dict[str, Any]:
    median = statistics.median(times)
    tflops = flops / median / 1e6
    row = {
        "case": name,
        **more,
        "us": median,
        "tflops": tflops,
        "percent_of_matmul": 100 * tflops / peak,
    }
    print(
        " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in row.items()
        ),
        flush=True,
    )
    return {**row, "samples_us": times, "flops": flops}


def bench_paged(name: str, layout: CacheLayout, tile: Tile | None, peak: float) -> dict[str, Any]:
    seqs = PAGED[name]
    kv_bytes = sum(tokens for _, tokens in seqs) * KV_HEADS * HEAD_SIZE * 4
    copies = [paged_inputs(seqs, layout) for _ in range(max(2, -(-ROTATED_BYTES // kv_bytes)))]
    longest = max(queries for queries, _ in seqs)
    outs = [torch.full_like(inputs[0], torch.nan) for inputs in copies[:1]] * len(copies)

    def call(inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> Call:
        return lambda: paged_prefill(
            *inputs, max_query_len=longest, layout=layout, out=out, tile=tile
        )

    call(copies[0], outs[0])()
    error = relative_error(outs[0], copies[0], layout)
    times = time_graph([call(*pair) for pair in zip(copies, outs, strict=True)])
    pairs = sum(n * tokens - n * (n - 1) // 2 for n, tokens in seqs)
    flops = 4 * HEADS * HEAD_SIZE * pairs
    gb_per_s = kv_bytes / statistics.median(times) / 1e3
    return result(
        name, times, flops, peak, layout=layout, tile=tile and list(tile), error=error,
        kv_gb_per_s=gb_per_s,
    )  # fmt: skip


def bench_dense(name: str, peak: float) -> list[dict[str, Any]]:
    q_len, kv_len = DENSE[name]
    make = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(q_len, HEADS, HEAD_SIZE, **make)
    k, v = (torch.randn(kv_len, KV_HEADS, HEAD_SIZE, **make) for _ in range(2))
    q_start, k_start = (
        torch.tensor([0, n], device="cuda", dtype=torch.int32) for n in (q_len, kv_len)
    )
    counted = traffic(q_len, kv_len, HEADS, KV_HEADS, HEAD_SIZE, torch.bfloat16)
    ways: dict[str, Call] = {
        "flash": lambda: flash_attention(q, k, v, q_start, k_start),
        "naive": lambda: naive_attention(q, k, v),
    }
    rows = []
    for way, call in ways.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        peak_bytes = torch.cuda.max_memory_allocated() - before
        counted_bytes = counted.flash_bytes if way == "flash" else counted.naive_bytes
        rows.append(
            result(
                name,
                time_graph([call] * 3),
                counted.flops,
                peak,
                way=way,
                counted_bytes=counted_bytes,
                peak_bytes=peak_bytes,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=[*PAGED, *DENSE])
    parser.add_argument("--layouts", nargs="+", default=["nhd"])
    parser.add_argument("--tiles", nargs="+", default=["chosen"], help="m,n,warps,stages")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    peak = matmul_tflops()
    print(f"matmul 8192^3: {peak:.0f} TFLOP/s", flush=True)
    rows = []
    for name in args.cases:
        if name in DENSE:
            rows += bench_dense(name, peak)
            continue
        for layout in args.layouts:
            for text in args.tiles:
                tile = None if text == "chosen" else Tile(*map(int, text.split(",")))
                rows.append(bench_paged(name, layout, tile, peak))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        where = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "date": datetime.now(UTC).date().isoformat(),
            "commit": collect()["commit"],
            "matmul_tflops": peak,
        }
        args.json.write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
