"""Time paged decode and KV writes on this GPU: `python benchmarks/kernels_decode.py [--json F]`.

One layer of 32 query and 8 KV heads of 128, blocks of 16, bfloat16 or fp8. A case's calls read
disjoint random blocks of one pool, so that several GB pass before a byte is read again, and are
captured in one CUDA graph; a sample is one replay over the number of calls. GB/s counts K and V
once; the read ceiling is measured in the same run. Every decode is compared with the float64
reference before it is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from random import Random  # noqa: TID251 - the lengths that peers were measured with
from typing import Any

import torch
import triton
import triton.language as tl

from simserve.config.environment import collect
from simserve_kernels import reference
from simserve_kernels.kv_write import kv_write
from simserve_kernels.layouts import CacheShape, allocate_cache, check_cache
from simserve_kernels.paged_decode import paged_decode

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
POOL_BLOCKS = 131_072
FP8 = torch.float8_e4m3fn
RAGGED = Random(7)
DECODES: dict[str, list[int]] = {
    "b1 ctx512": [512],
    "b1 ctx2048": [2048],
    "b1 ctx8192": [8192],
    "b1 ctx32768": [32768],
    "b8 ctx512": [512] * 8,
    "b8 ctx2048": [2048] * 8,
    "b8 ctx8192": [8192] * 8,
    "b64 ctx512": [512] * 64,
    "b64 ctx2048": [2048] * 64,
    "b64 ctx8192": [8192] * 64,
    "b256 ctx512": [512] * 256,
    "b256 ctx2048": [2048] * 256,
    "b64 ragged": [
        max(16, min(32768, int(RAGGED.lognormvariate(0, 1) * 2048 / 1.6487))) for _ in range(64)
    ],
    "63 x ctx512 + ctx32768": [512] * 63 + [32768],
}
FP8_DECODES = ("b8 ctx2048", "b8 ctx8192", "b64 ctx2048", "b64 ctx8192")
WRITES = (64, 256, 2048, 8192)


def time_calls(calls: list[Callable[[], object]], budget_s: float) -> list[float]:
    """Return samples of µs a call: replays of one CUDA graph of all calls, warmed up."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    one = _replay_us(graph)
    replays = max(5, min(50, int(budget_s * 1e6 / one)))
    return [_replay_us(graph) / len(calls) for _ in range(replays)]


def _replay_us(graph: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) * 1e3)


@triton.jit
def _read_kernel(source, out, RUN: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    first = source + tl.program_id(0).to(tl.int64) * RUN
    for start in range(0, RUN, BLOCK):
        total += tl.load(first + start + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))


def read_ceiling(cache: torch.Tensor) -> list[float]:
    """Return samples of GB/s of a kernel that reads the tensor once."""
    run = 32_768
    programs = cache.numel() // run
    out = torch.empty(programs, device=cache.device)
    samples = time_calls([lambda: _read_kernel[(programs,)](cache, out, run, 2048, num_warps=4)], 1)
    return [cache.nbytes / sample / 1e3 for sample in samples]


def decode_calls(
    caches: tuple[torch.Tensor, torch.Tensor], layout: str, lengths: list[int], path: str
) -> list[Callable[[], object]]:
    """Return calls over disjoint random blocks; the first one's result is checked."""
    generator = torch.Generator().manual_seed(len(lengths))
    order = torch.randperm(POOL_BLOCKS, generator=generator).int()
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    copies = max(1, min(256 if len(lengths) == 1 else 64, POOL_BLOCKS // sum(counts)))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    calls: list[Callable[[], object]] = []
    for copy in range(copies):
        owned = order[copy * sum(counts) : (copy + 1) * sum(counts)].split(counts)
        table = torch.nn.utils.rnn.pad_sequence(list(owned), batch_first=True).cuda()
        q = torch.randn(len(lengths), NUM_HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
        call = _decode(q, caches, table, seq_lens, layout, path, max(lengths))
        if copy == 0:
            _check(call(), q, caches, table, seq_lens, layout)
        calls.append(call)
    return calls


def _decode(
    q: Any, caches: Any, table: Any, seq_lens: Any, layout: Any, path: Any, bound: int
) -> Callable[[], Any]:
    return lambda: paged_decode(
        q, *caches, table, seq_lens, max_seq_len=bound, layout=layout, path=path
    )


def _check(out: Any, q: Any, caches: Any, table: Any, seq_lens: Any, layout: Any) -> None:
    some = slice(-2, None)
    ref = reference.paged_attention(q[some], *caches, table[some], seq_lens[some], layout=layout)
    error = float((out[some].double() - ref).norm() / ref.norm())
    if not error <= 5e-3:
        raise SystemExit(f"relative error {error:.1e}")


def write_calls(
    caches: tuple[torch.Tensor, torch.Tensor], layout: str, num_tokens: int
) -> list[Callable[[], object]]:
    """Return writes into random blocks: a token a block up to 256 tokens, else whole blocks."""
    calls: list[Callable[[], object]] = []
    generator = torch.Generator().manual_seed(num_tokens)
    dtype = caches[0].dtype
    for _ in range(64):
        k, v = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_SIZE, device="cuda", dtype=dtype)
        blocks = torch.randperm(POOL_BLOCKS, generator=generator)
        if num_tokens <= 256:
            slots = blocks[:num_tokens] * BLOCK_SIZE + 5
        else:
            whole = blocks[: num_tokens // BLOCK_SIZE, None] * BLOCK_SIZE
            slots = (whole + torch.arange(BLOCK_SIZE)).flatten()
        calls.append(_write(k, v, caches, slots.cuda(), layout))
    return calls


def _write(k: Any, v: Any, caches: Any, slots: Any, layout: Any) -> Callable[[], object]:
    return lambda: kv_write(k, v, *caches, slots, layout=layout)


def random_pool(layout: Any, dtype: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of the pool, normal numbers."""
    shape = CacheShape(POOL_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    caches = allocate_cache(shape, layout, dtype, "cuda")
    for cache in caches:
        for part in cache.split(8192):
            part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
    check_cache(*caches, layout)
    return caches


def measure(paths: list[str], layouts: list[str], cases: list[str], budget_s: float) -> Any:
    """Return one row for each case, path, layout and dtype."""
    rows = []
    ceiling = 0.0
    for layout in layouts:
        for dtype in (torch.bfloat16, FP8):
            caches = random_pool(layout, dtype)
            if dtype != FP8:
                ceiling = max(ceiling, statistics.median(read_ceiling(caches[0])))
            token_bytes = 2 * NUM_KV_HEADS * HEAD_SIZE * dtype.itemsize
            for case in FP8_DECODES if dtype == FP8 else DECODES:
                for path in paths:
                    if cases and not any(part in f"decode {case}" for part in cases):
                        continue
                    samples = time_calls(
                        decode_calls(caches, layout, DECODES[case], path), budget_s
                    )
                    size = sum(DECODES[case]) * token_bytes
                    rows.append(row(f"decode {case}", path, layout, dtype, size, samples, ceiling))
            for count in WRITES if dtype != FP8 else ():
                if cases and not any(part in f"kv_write {count}" for part in cases):
                    continue
                samples = time_calls(write_calls(caches, layout, count), budget_s)
                size = 2 * count * token_bytes
                rows.append(row(f"kv_write {count}", "", layout, dtype, size, samples, ceiling))
            del caches
            torch.cuda.empty_cache()
    return {"read_ceiling_gb_s": ceiling, "rows": rows}


def row(
    case: str,
    path: str,
    layout: str,
    dtype: torch.dtype,
    num_bytes: int,
    samples: list[float],
    ceiling: float,
) -> dict[str, Any]:
    median = statistics.median(samples)
    rate = num_bytes / median / 1e3
    name = str(dtype).removeprefix("torch.")
    share = 100 * rate / ceiling
    print(
        f"{case:32}{path:5}{layout:7}{name:14}{median:9.1f} us {rate:7.0f} GB/s {share:4.0f} %",
        flush=True,
    )
    return {
        "case": case,
        "path": path,
        "layout": layout,
        "kv_dtype": name,
        "kv_bytes": num_bytes,
        "median_us": median,
        "gb_s": rate,
        "percent_of_read_ceiling": share,
        "samples_us": samples,
    }


def _options(given: list[str]) -> list[str]:
    """Return the command line without the name of the output file."""
    return [
        word
        for before, word in zip(["", *given], given, strict=False)
        if "--json" not in (before, word)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--paths", nargs="+", default=["auto", "v1", "v2"])
    parser.add_argument("--layouts", nargs="+", default=["nhd", "packed"])
    parser.add_argument("--cases", nargs="+", default=[], help="parts of case names")
    parser.add_argument("--budget-s", type=float, default=0.1, help="of replays a case")
    arguments = parser.parse_args()
    result = {
        "command": ["python", "benchmarks/kernels_decode.py", *_options(sys.argv[1:])],
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": collect()["commit"],
        "torch": torch.__version__,
        "triton": triton.__version__,
        **measure(arguments.paths, arguments.layouts, arguments.cases, arguments.budget_s),
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
