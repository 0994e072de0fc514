"""What choosing tokens costs on this GPU: by method, batch and vocabulary.

    python benchmarks/sampling_cost.py [--out FILE] [--seconds N]

Runs the sampler of the real executor on logits in bfloat16 (normal, standard deviation 2.5),
replayed in CUDA graphs, on rows that take turns so that they outgrow the caches. All samples go to
a JSON file, which `benchmarks/sampling_fit.py` fits the package's coefficients to.

`argmax` is what the executor does without a sampler. `draw` is its sampler, by the settings of the
requests; `store` keeps what was chosen, with log-probabilities of so many of the likeliest tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simserve.cli.measurement import write_measurement
from simserve.executor.real.bench.gpu import require_gpu
from simserve.sampling import RequestSampling

if TYPE_CHECKING:
    from simserve.executor.real.bench.sample_cost import SamplingBench
    from simserve.executor.real.bench.timing import Call

RESULTS = Path(__file__).resolve().parent / "results" / "sampling_cost_h200.json"
VOCAB_SIZES = (128_256, 32_000, 151_936)
BATCHES = (1, 16, 64, 128, 256, 512)
COMPILED_BATCHES = (1, 64, 256)
"""Others run what has been compiled for these."""
NUM_ROWS = 1024
GREEDY = RequestSampling(temperature=0.0)
TOP_P = RequestSampling(top_p=0.9)
DRAWS: dict[str, tuple[RequestSampling, ...]] = {
    "greedy": (GREEDY,),
    "temperature": (RequestSampling(),),
    "top_k": (RequestSampling(top_k=50),),
    "top_p": (TOP_P,),
    "min_p": (RequestSampling(min_p=0.05),),
    "top_k top_p": (RequestSampling(top_k=50, top_p=0.9),),
    "mixed": (*[GREEDY] * 3, *[TOP_P] * 7),
    "penalties": (
        RequestSampling(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    ),
}
"""What the rows of a batch ask for, in turns. With `penalties` they are drawn by temperature."""
LOGPROBS = (None, 0, 1, 5, 20)


class Cell(NamedTuple):
    """One measurement."""

    call: str
    """`argmax`, `draw` or `store`."""
    method: str
    """Of DRAWS; of `store` how many log-probabilities."""
    vocab_size: int
    batch: int


def cells(batches: tuple[int, ...] = BATCHES) -> Iterator[Cell]:
    """All of them, a vocabulary after the other."""
    for vocab_size in VOCAB_SIZES:
        methods = [("argmax", ""), *product(["draw"], DRAWS)]
        methods += product(["store"], map(str, LOGPROBS))
        for (call, method), batch in product(methods, batches):
            yield Cell(call, method, vocab_size, batch)


def calls_of(bench: SamplingBench, cell: Cell) -> list[Call]:
    if cell.call == "argmax":
        return bench.argmax_calls(cell.batch)
    if cell.call == "draw":
        return bench.draw_calls(DRAWS[cell.method], cell.batch)
    num_logprobs = None if cell.method == "None" else int(cell.method)
    return bench.store_calls(num_logprobs, cell.batch)


def bench_of(vocab_size: int, num_rows: int, most: int) -> SamplingBench:
    import torch

    from simserve.executor.real.bench.sample_cost import SamplingBench

    return SamplingBench(vocab_size, num_rows, most, torch.device("cuda"))


def compile_kernels(cell: Cell) -> None:
    """Run a call once, so that its kernels are in Triton's cache."""
    import torch

    calls_of(bench_of(cell.vocab_size, cell.batch, cell.batch), cell)[0]()
    torch.cuda.synchronize()


def measured(end_s: float) -> Iterator[tuple[Cell, list[float]]]:
    """Samples of µs a call of each cell that is begun in time."""
    from simserve.executor.real.bench.timing import time_graph

    bench, vocab_size = None, None
    for cell in cells():
        if time.monotonic() > end_s:
            return
        if cell.vocab_size != vocab_size:
            bench, vocab_size = bench_of(cell.vocab_size, NUM_ROWS, max(BATCHES)), cell.vocab_size
        yield cell, time_graph(calls_of(bench, cell))


def main() -> None:
    """Measure as many cells as the time allows, and write them with those left out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.json")
    parser.add_argument("--seconds", type=float, default=300, help="no cell begins later")
    arguments = parser.parse_args()
    require_gpu("a measurement of sampling")
    end_s = time.monotonic() + arguments.seconds
    command = ["python", "benchmarks/sampling_cost.py", "--seconds", f"{arguments.seconds:g}"]
    compiled = [cell for cell in cells(COMPILED_BATCHES) if cell.method in (*DRAWS, "0", "1")]
    workers = max(1, (os.cpu_count() or 1) - 2)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_kernels, compiled, chunksize=1)
    print(f"compiled, {end_s - time.monotonic():.0f} s left")
    rows: list[dict[str, Any]] = []
    for cell, samples_us in measured(end_s):
        median_us = statistics.median(samples_us)
        rounded = [round(one, 3) for one in samples_us]
        rows.append({**cell._asdict(), "median_us": median_us, "samples_us": rounded})
        print(f"{' '.join(map(str, cell)):40}{median_us:10.1f} µs")
    left_out = [cell._asdict() for cell in cells()][len(rows) :]
    content = {"logits_dtype": "bfloat16", "rows": rows, "left_out": left_out}
    write_measurement(arguments.out, command, content)
    print(f"{len(rows)} measured, {len(left_out)} left out")


if __name__ == "__main__":
    main()
