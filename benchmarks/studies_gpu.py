"""The studies' halves that need a GPU, in one sitting: `python benchmarks/studies_gpu.py`.

One model with random weights serves the cells of `study_cells.py`, which differ in settings that
a machine does not depend on; other kernels and block sizes have machines of their own. Then come
single kernels. Everything goes to one JSON file, written anew after each piece: what fails is
recorded with its reason, and what the time limit leaves out is named. `--resume FILE` keeps what a
file has already; with `--renew` until it has been measured again. `--rehearse` runs all of it on a
CPU, with a tiny model and short prompts.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from study_cells import BLOCK_SIZE, BUDGET, MACHINE, MAX_NUM_SEQS, PARTS, Cell, cells, constant

from simserve.api import run
from simserve.config.build import build
from simserve.config.build_real import open_machine
from simserve.config.environment import collect
from simserve.config.loader import LoadedConfig, load_config
from simserve.executor.real.bench.step_cases import parse_step_case
from simserve.executor.real.bench.step_report import step_row
from simserve.executor.real.bench.steps import measure_steps
from simserve.metrics.result import RunResult

if TYPE_CHECKING:
    from simserve.executor.real.machine import Machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "studies_h200.json"
STAGES = ("cells", "attention", "block sizes", "kernels")
OPENING_S = 25.0
"""A machine is not opened with less time left."""
STEP_CASES = (
    "1@512",
    "1@2048",
    "1@8000",
    "1@30000",
    "32*1@512",
    "32*1@2048",
    "32*1@8000",
)
LAUNCH_CASES = ("32*1@512", "2048", "512@8000", "32*1@512,2016")
LAUNCHES = re.compile(r"cu(da)?(LaunchKernel|GraphLaunch)\w*")
SUMMARY = re.compile(
    r"(class\.[^.]+\.)?(p50|p95|p99|mean)_(ttft|itl|e2el|tpot)_ms"
    r"|status|completed|duration|num_(steps|preemptions|gpu_blocks)|recomputed_tokens"
    r"|total_(cached|input|output)_tokens|(output|total_token)_throughput|request_goodput"
    r"|group\.mean_e2el_ms|num_(prefill|decode)_tokens|max_num_running"
    r"|mean_num_running|(max|mean)_kv_cache_usage|mean_reserved_unused_tokens"
    r"|evicted_cached_blocks|prefix_cache_hit_rate|reachable_in_engine|seed"
)
REQUESTS = (
    "class", "arrival_time_s", "first_token_s", "ttft_ms", "e2el_ms", "max_itl_ms", "input_length",
    "output_length", "cached_tokens", "num_preemptions",
)  # fmt: skip
COUNTS = ("duration_s", "num_running", "num_prefill_tokens", "num_decode_tokens")
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


class Sitting:
    """What is measured, as it grows, and how much time is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._began = perf_counter()
        self._limit_s: float = arguments.time_limit
        self._out = arguments.out
        self.patterns: list[str] = arguments.cells
        self._renewed: set[tuple[str, str]] | None = set() if arguments.renew else None
        self.report: dict[str, Any] = {
            "command": ["python", "benchmarks/studies_gpu.py", "--time-limit", str(self._limit_s)],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": collect(),
            "machines": {},
            "launches": {},
            "cells": {},
            "steps": {},
            "kernels": {},
            "sittings": [],
            "left_out": [],
        }
        if arguments.resume is not None:
            before = json.loads(arguments.resume.read_text(encoding="utf-8"))
            for kind in ("machines", "launches", "cells", "steps", "kernels"):
                good = {k: v for k, v in before.get(kind, {}).items() if not v.get("failure")}
                self.report[kind] = good
            self.report["sittings"] = before["sittings"]
        commit = self.report["environment"]["commit"]
        self.report["sittings"].append({"date": self.report["date"], "commit": commit})
        self.failed = False

    @property
    def left_s(self) -> float:
        return self._limit_s - (perf_counter() - self._began)

    def has(self, kind: str, name: str) -> bool:
        """Whether it is there already, and need not be renewed."""
        done = self._renewed is None or (kind, name) in self._renewed
        return done and name in self.report[kind]

    def measure(
        self, kind: str, name: str, call: Callable[[], dict[str, Any]], needs_s: float = 0.0
    ) -> None:
        """Keep what `call` returns, or why it failed; nothing if it is there or time is up. What is
        renewed without success stays as it was."""
        if self.has(kind, name):
            return
        if self.left_s <= needs_s:
            self.report["left_out"].append(f"{kind}: {name}")
            self._tell(f"{kind}: {name}: left out, time is up")
            return
        began = perf_counter()
        try:
            row = {"failure": None, **call()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest goes on
            row = {"failure": f"{type(error).__name__}: {error}"[:2000]}
        self.failed = self.failed or bool(row["failure"])
        row["wall_s"] = round(perf_counter() - began, 3)
        row["sitting"] = self.report["date"]
        if not row["failure"] or name not in self.report[kind]:
            self.report[kind][name] = row
        if self._renewed is not None:
            self._renewed.add((kind, name))
        self._tell(f"{kind}: {name}: {row['failure'] or 'ok'}, {row['wall_s']:.2f} s")
        self.write()

    def write(self) -> None:
        self.report["sittings"][-1]["wall_s"] = round(perf_counter() - self._began, 1)
        self._forget_sittings()
        text = json.dumps(self.report, ensure_ascii=False, separators=(",", ":"))
        lines = text.replace('},"', '},\n"') + "\n"  # a line a piece: differences can be read
        self._out.write_text(lines, encoding="utf-8")

    def _forget_sittings(self) -> None:
        """Leave out those of which nothing is left."""
        kinds = ("launches", "cells", "steps", "kernels")
        dates = {row.get("sitting") for kind in kinds for row in self.report[kind].values()}
        if None not in dates:
            kept = [one for one in self.report["sittings"][:-1] if one["date"] in dates]
            self.report["sittings"] = [*kept, self.report["sittings"][-1]]

    def _tell(self, text: str) -> None:
        print(f"{perf_counter() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)


class Settings:
    """How configurations are changed: to run for real, and in a rehearsal to be short."""

    def __init__(self, rehearsal: Path | None) -> None:
        self.is_rehearsal = rehearsal is not None
        self.device = "cpu" if rehearsal else "cuda"
        self.step_cases = STEP_CASES[:1] if rehearsal else STEP_CASES
        self._rehearsal = rehearsal

    @property
    def executor(self) -> list[str]:
        """Overrides of every configuration."""
        if self._rehearsal is None:
            return ["executor={kind: real, device: cuda}"]
        model = f"model={{config: {self._rehearsal}}}"
        return ["executor={kind: real, device: cpu, dtype: float32}", model]

    def of(self, config: str) -> list[str]:
        """Overrides of a configuration of configs/studies."""
        if not self.is_rehearsal:
            return self.executor
        text = (ROOT / "configs" / "studies" / f"{config}.yaml").read_text(encoding="utf-8")
        if "trace:" in text:
            return [*self.executor, "workload.trace.prompt_len_multiplier=0.01"]
        return [*self.executor, constant("prompt_len", 20), constant("output_len", 4)]

    def machine(self, changes: Mapping[str, Any] = MACHINE) -> LoadedConfig:
        """The configuration of a machine: `MACHINE` with some limits changed."""
        settings = [f"{key}={value}" for key, value in {**MACHINE, **changes}.items()]
        one = {"num_requests": 1, "output_len": {"kind": "constant", "value": 1}}
        source = {"model": "llama-3.1-8b", "gpu": "h200", "workload": {"synthetic": one}}
        return load_config(source, [*self.executor, *settings])


def main() -> int:
    arguments = parse()
    sitting = Sitting(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = None
        if arguments.rehearse:
            rehearsal = Path(folder) / "config.json"
            rehearsal.write_text(json.dumps(TINY))
        settings = Settings(rehearsal)
        for stage in arguments.only or STAGES:
            {
                "cells": main_machine,
                "attention": attention_kernels,
                "block sizes": block_sizes,
                "kernels": single_kernels,
            }[stage](sitting, settings)
    sitting.write()
    return int(sitting.failed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.json")
    parser.add_argument("--resume", type=Path, metavar="FILE.json", help="keep what it has")
    parser.add_argument("--time-limit", type=float, default=230.0, metavar="SECONDS")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=str(STAGES))
    parser.add_argument("--renew", action="store_true", help="measure what it has again")
    parser.add_argument(
        "--cells", nargs="+", default=["*"], metavar="PATTERN", help="only cells of such names"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny")
    return parser.parse_args()


def main_machine(sitting: Sitting, settings: Settings) -> None:
    """All cells with blocks of 16, what a step launches, and whole steps with `auto`."""
    wanted = list(missing(sitting, settings, lambda cell: cell.block_size == 16))
    if not wanted and has_steps(sitting, settings, "auto"):
        return
    loaded = settings.machine()
    with machine(sitting, loaded, "blocks of 16") as opened:
        if opened is None:
            return
        run_cells(sitting, wanted, opened)
        run_steps(sitting, settings, loaded, opened, "auto")
        if settings.device == "cuda":
            for case in LAUNCH_CASES:
                sitting.measure("launches", case, partial(launches, loaded, opened, case))


def attention_kernels(sitting: Sitting, settings: Settings) -> None:
    """Whole steps of decodes alone, with the kernels that the first paged attention had."""
    if settings.is_rehearsal:  # a CPU has no such kernels
        return
    for way in ("v1", "v2"):
        if has_steps(sitting, settings, way):
            continue
        limits = {MAX_NUM_SEQS: 32, BUDGET: 64, "executor.attention": way}
        loaded = settings.machine(limits)
        with machine(sitting, loaded, f"attention {way}") as opened:
            if opened is not None:
                run_steps(sitting, settings, loaded, opened, way)


def block_sizes(sitting: Sitting, settings: Settings) -> None:
    """Cells with blocks of another size than 16, a machine each."""
    wanted = list(missing(sitting, settings, lambda cell: cell.block_size != 16))
    wanted.sort(key=lambda cell: cell.name in sitting.report["cells"])  # first what was never run
    for size in dict.fromkeys(cell.block_size for cell in wanted):
        chosen = [cell for cell in wanted if cell.block_size == size]
        num_blocks = MACHINE["kv_cache.num_gpu_blocks"] * 16 // size
        limits = {BLOCK_SIZE: size, "kv_cache.num_gpu_blocks": num_blocks, BUDGET: 8192}
        with machine(sitting, settings.machine(limits), f"blocks of {size}") as opened:
            if opened is not None:
                run_cells(sitting, chosen, opened)


def single_kernels(sitting: Sitting, settings: Settings) -> None:
    """Decodes and a chunk by block size, and decodes by the order of their blocks."""
    from study_kernels import kernel_pieces

    for name, call in kernel_pieces(is_rehearsal=settings.is_rehearsal):
        sitting.measure("kernels", name, call)


def missing(sitting: Sitting, settings: Settings, keep: Callable[[Cell], bool]) -> Iterator[Cell]:
    for part in PARTS:
        for cell in cells(part, settings.of(part.config)):
            chosen = any(fnmatchcase(cell.name, pattern) for pattern in sitting.patterns)
            if chosen and keep(cell) and not sitting.has("cells", cell.name):
                yield cell


@contextmanager
def machine(sitting: Sitting, loaded: LoadedConfig, name: str) -> Iterator[Machine | None]:
    """An open machine; None if it could not be opened, which is recorded."""
    found: list[Machine] = []

    def opening() -> dict[str, Any]:
        found.append(open_machine(loaded))
        facts = {k: v for k, v in found[0].facts.items() if isinstance(v, str | int | float | bool)}
        scheduler = loaded.config.scheduler
        return facts | {
            "block_size": loaded.config.kv_cache.block_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_model_len": scheduler.max_model_len,
        }

    sitting.report["machines"].pop(name, None)  # of a sitting before: it is opened again
    sitting.measure("machines", name, opening, OPENING_S)
    try:
        yield found[0] if found else None
    finally:
        if found:
            found.pop().close()
        gc.collect()


def run_cells(sitting: Sitting, wanted: Sequence[Cell], opened: Machine) -> None:
    for cell in wanted:
        sitting.measure("cells", cell.name, partial(run_cell, cell, opened))


def run_cell(cell: Cell, opened: Machine) -> dict[str, Any]:
    """One real run and what is kept of it."""
    if cell.point.loaded is None:
        raise ValueError(f"its values do not go together: {cell.point.error}")
    result = run(cell.point.loaded, machine=opened)
    table = result.requests_table
    return {
        "config": cell.part.config,
        "scenario": cell.point.scenario,
        "values": cell.point.values,
        "overrides": list(cell.part.overrides),
        "summary": {k: v for k, v in result.summary_dict.items() if SUMMARY.fullmatch(k)},
        "requests": {name: rounded(table[name].to_pylist()) for name in REQUESTS},
        "steps": of_steps(result),
    }


def of_steps(result: RunResult) -> dict[str, Any]:
    """Sums over steps, and what one of decodes alone takes."""
    table = result.steps_table
    numbers = {
        name: table[name].to_numpy()
        for name in table.column_names
        if name.startswith("parts.") or name in COUNTS
    }
    alone = numbers["num_prefill_tokens"] == 0
    tokens = numbers["num_prefill_tokens"] + numbers["num_decode_tokens"]
    durations = numbers["duration_s"]
    return {
        "num_steps": len(alone),
        "num_decode_steps": int(alone.sum()),
        "median_decode_step_ms": 1e3 * float(np.median(durations[alone])) if alone.any() else None,
        "prefill_step_tokens": tokens[~alone].tolist(),
        "max_num_running": int(numbers["num_running"].max()),
        "duration_s": float(durations.sum()),
        "parts": {k: float(v.sum()) for k, v in numbers.items() if k.startswith("parts.")},
    }


def has_steps(sitting: Sitting, settings: Settings, way: str) -> bool:
    return all(sitting.has("steps", f"{way} {case}") for case in settings.step_cases)


def run_steps(
    sitting: Sitting, settings: Settings, loaded: LoadedConfig, opened: Machine, way: str
) -> None:
    for case in settings.step_cases:
        sitting.measure("steps", f"{way} {case}", partial(steps, loaded, opened, case, (3, 15)))


def steps(
    loaded: LoadedConfig, opened: Machine, text: str, counts: tuple[int, int]
) -> dict[str, Any]:
    """A step of one shape over and over, as `simserve bench step` does."""
    parts = build(loaded, loaded.config.seed, machine=opened).parts
    case = parse_step_case(text)
    (samples,) = measure_steps(
        parts.executor,
        [case],
        block_size=parts.kv.block_size,
        num_gpu_blocks=parts.kv.num_gpu_blocks,
        num_warmup_steps=counts[0],
        num_steps=counts[1],
    )
    row = step_row(case, samples)
    return {name: row[name] for name in ("num_requests", "num_tokens", "median_ms", "parts_ms")} | {
        "samples_s": rounded(samples.durations_s)
    }


def launches(loaded: LoadedConfig, opened: Machine, case: str) -> dict[str, Any]:
    """Launches of kernels and graphs a step, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    num_steps = 4
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps(loaded, opened, case, (1, num_steps - 1))
    counts: Counter[str] = Counter()
    for event in profiler.key_averages():
        if LAUNCHES.fullmatch(event.key):
            counts["graphs" if "Graph" in event.key else "kernels"] += event.count
    return {"num_steps": num_steps, **{f"num_{k}": n / num_steps for k, n in counts.items()}}


def rounded(values: Sequence[Any]) -> list[Any]:
    """To a microsecond (a nanosecond of milliseconds)."""
    return [round(one, 6) if isinstance(one, float) else one for one in values]


if __name__ == "__main__":
    sys.exit(main())
