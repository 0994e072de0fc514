"""Tables and pictures of the two studies of kernels: V1 against V2, flash against naive."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from study_cases import shown
from study_h200 import RESULTS, measured, way_name
from study_pictures import Panel, draw_panels

from simserve.config.build import build
from simserve.config.loader import load_config
from simserve.executor.real.bench.step_cases import parse_step_case
from simserve.executor.real.bench.steps import measure_steps

DECODE = re.compile(r"decode b(\d+) ctx(\d+)")
DENSE = re.compile(r"dense (1 @ )?(\d+) d(\d+) (\w+)")
PARTITION, NUM_HEADS = 512, 32
WAYS = ("v1", "v2", "auto")

Row = Mapping[str, Any]


@cache
def rows_of(name: str) -> Sequence[Row]:
    """Rows of a file of benchmarks/results."""
    report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    rows: Sequence[Row] = report["rows"]
    return rows


def rule(num_seqs: int, context: int) -> str:
    """Which kernel vLLM v0.11.0's wrapper of the first paged attention takes."""
    num_partitions = -(-context // PARTITION)
    is_v1 = context <= 8192 and (num_partitions == 1 or num_seqs * NUM_HEADS > 512)
    return "v1" if is_v1 else "v2"


@cache
def decodes() -> Mapping[tuple[int, int], Mapping[str, Row]]:
    """By batch and context: a row for each way."""
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows_of("kernels_decode_h200"):
        name = DECODE.fullmatch(row["case"])
        if name and row["layout"] == "nhd" and not row["failure"]:
            found.setdefault((int(name[1]), int(name[2])), {})[row["path"]] = row
    return {at: ways for at, ways in found.items() if set(WAYS) <= set(ways)}


def decode_kernels() -> list[list[str]]:
    """A row a batch and context: which of the two is faster, which the rule takes."""
    header = ["requests", "context", "V1", "V2", "faster", "the rule takes", "it loses", "auto"]
    cells = [[*header, "auto, of read"]]
    for (batch, context), ways in decodes().items():
        times = {way: ways[way]["median_us"] for way in WAYS}
        taken, best = rule(batch, context), min(times["v1"], times["v2"])
        loss = 100 * (times[taken] / best - 1)
        cells.append(
            [
                f"{batch}",
                f"{context:,}",
                *(f"{times[way]:,.1f}" for way in ("v1", "v2")),
                "V1" if times["v1"] == best else "V2",
                taken.upper(),
                f"{loss:.0f} %",
                f"{times['auto']:,.1f}",
                f"{ways['auto']['percent_of_read_ceiling']:.0f} %",
            ]
        )
    return cells


def decode_steps() -> list[list[str]] | None:
    """Whole steps by kernel, and what the simulator says of the same step."""
    rows = (measured() or {"steps": {}})["steps"]
    found = {name: row for name, row in rows.items() if not row["failure"]}
    cases = list(dict.fromkeys(name.partition(" ")[2] for name in found))
    if not cases:
        return None
    cells = [["requests", "context", "V1", "V2", "auto", "simulated"]]
    for text in cases:
        case = parse_step_case(text)
        cells.append([f"{len(case.requests)}", f"{case.requests[0].num_computed_tokens:,}"])
        for way in WAYS:
            row = found.get(f"{way} {text}")
            cells[-1].append("–" if row is None else f"{row['median_ms']:.2f}")
        cells[-1].append(f"{1e3 * simulated_step(text):.2f}")
    return cells


def simulated_step(text: str) -> float:
    """Seconds of a step of this shape by the H200's profile."""
    one = {"num_requests": 1, "output_len": {"kind": "constant", "value": 1}}
    cost = {"kind": "profile", "name": "h200-llama-3.1-8b-vllm"}
    config = {
        "model": "llama-3.1-8b",
        "gpu": "h200",
        "workload": {"synthetic": one},
        "executor": {"cost": cost},
        "kv_cache": {"num_gpu_blocks": 17001},
    }
    parts = build(load_config(config), 0).parts
    (samples,) = measure_steps(
        parts.executor,
        [parse_step_case(text)],
        block_size=16,
        num_gpu_blocks=17001,
        num_warmup_steps=3,
        num_steps=15,
    )
    return statistics.median(samples.durations_s)


def draw_decode_kernels() -> bytes:
    """Medians (µs a layer) of each kernel over the context, a panel a batch size."""
    panels = []
    for batch in (1, 8, 64):
        contexts = [context for one, context in decodes() if one == batch]
        series = {
            way_name(way): [decodes()[batch, context][way]["median_us"] for context in contexts]
            for way in WAYS
        }
        title = f"{batch} request{'s' if batch > 1 else ''}"
        places = [f"{context:,}" for context in contexts]
        panels.append(
            Panel(
                title,
                "µs a layer",
                series,
                places,
                "context (tokens)",
                is_log=True,
                is_line=True,
                is_dense=True,
            )
        )
    return draw_panels(panels)


@cache
def dense() -> Mapping[tuple[str, str], Row]:
    """Timed rows by case and way."""
    rows = {
        (row["case"], row["path"]): row
        for row in rows_of("kernels_dense_h200")
        if DENSE.fullmatch(row["case"]) and not row["failure"]
    }
    return {key: rows[key] for key in sorted(rows, key=lambda key: order(key[0]))}


def order(case: str) -> tuple[bool, str, int, int]:
    name = DENSE.fullmatch(case)
    assert name is not None
    return bool(name[1]), name[4], int(name[3]), int(name[2])


def shape_cells(case: str) -> list[str]:
    """Rows, keys, head size and dtype."""
    name = DENSE.fullmatch(case)
    assert name is not None
    num_keys = int(name[2]) + bool(name[1])
    return ["1" if name[1] else f"{num_keys:,}", f"{num_keys:,}", name[3], name[4]]


def flash_time() -> list[list[str]]:
    """Time and memory, and how far apart the two are, a row a shape."""
    header = ["rows", "keys", "head", "dtype", "flash µs", "naive µs", "time ×", "flash MB"]
    cells = [[*header, "naive MB", "flash: bytes moved (MB)", "naive: bytes moved (MB)", "bytes ×"]]
    for case in dict.fromkeys(case for case, _ in dense()):
        flash, naive = (dense()[case, way] for way in ("flash", "naive"))
        cells.append(shape_cells(case))
        cells[-1] += [f"{row['median_us']:,.1f}" for row in (flash, naive)]
        cells[-1].append(f"{naive['median_us'] / flash['median_us']:.1f}")
        cells[-1] += [f"{row['peak_bytes'] / 1e6:,.1f}" for row in (flash, naive)]
        cells[-1] += [f"{row['num_bytes'] / 1e6:,.1f}" for row in (flash, naive)]
        cells[-1].append(f"{naive['num_bytes'] / flash['num_bytes']:,.1f}")
    return cells


def flash_counters() -> list[list[str]]:
    """Bytes by the hardware's counters beside the counted ones."""
    rows = {(row["case"], row["path"]): row for row in rows_of("kernels_counters_h200")}
    columns = ["counted", "read", "written"]
    names = (f"{way}: {c}" for way in ("flash", "naive") for c in columns)
    cells = [["rows", "keys", "head", "dtype", *names]]
    found = {case for case, _ in rows if DENSE.fullmatch(case)}
    for case in sorted(found, key=order):
        cells.append(shape_cells(case))
        for way in ("flash", "naive"):
            row = rows[case, way]
            moved = [
                sum(one[key] for one in row["kernels"]) for key in ("read_bytes", "written_bytes")
            ]
            cells[-1] += [f"{value / 1e6:,.1f}" for value in (row["counted_bytes"], *moved)]
    return cells


def draw_flash() -> bytes:
    """Time, memory and bytes over the sequence length, heads of 128 in bfloat16."""
    cases = [case for case, way in dense() if way == "flash" and re.search("d128 bf", case)]
    whole = [case for case in cases if "@" not in case]
    places = [shown(int(case.split()[1])) for case in whole]
    titles = {
        "median_us": ("Time", "µs", 1.0),
        "peak_bytes": ("Memory beside the inputs", "MB", 1e6),
        "num_bytes": ("Bytes moved (counted)", "MB", 1e6),
    }
    panels = []
    for key, (title, unit, divisor) in titles.items():
        series = {
            way: [dense()[case, way][key] / divisor for case in whole] for way in ("flash", "naive")
        }
        panels.append(
            Panel(title, unit, series, places, "tokens", is_log=True, is_line=True, is_dense=True)
        )
    return draw_panels(panels)
