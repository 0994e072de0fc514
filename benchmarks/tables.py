"""The tables of docs/ that show measurements, written from benchmarks/results.

    python benchmarks/tables.py           # rewrite them
    python benchmarks/tables.py --check   # exit with 1 if a page and a result do not agree

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`; NAME is a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from accuracy import TABLES as ACCURACY
from accuracy_causes import table as accuracy_causes_table
from accuracy_cross import table as accuracy_cross_table
from accuracy_repeats import table as accuracy_repeats_table
from calibrated_repeats import table as calibrated_repeats_table
from calibrated_runs import host_table as calibrated_host_table
from calibrated_runs import table as calibrated_runs_table
from kernels_counters import table as counters_table
from sampling_table import table as sampling_table
from simulator import table as simulator_table

from simserve.cost.profile_file import RegimeError
from simserve.executor.real.bench.step_report import step_cells
from simserve.fidelity.fit.report import error_cells
from simserve.fidelity.validate.percentile_table import Compared, percentile_cells
from simserve.report.markdown import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PROFILES = "../../simserve/presets/profiles"
BLOCK = re.compile(r"(<!-- (\S.*?): begin -->\n).*?(<!-- \2: end -->)", re.S)

Report = dict[str, Any]
DECODE_COLUMNS = {
    "auto": ("auto", "nhd"),
    "v1": ("v1", "nhd"),
    "v2": ("v2", "nhd"),
    "auto, packed": ("auto", "packed"),
    "v1, packed": ("v1", "packed"),
    "v2, packed": ("v2", "packed"),
}
PEERS = {
    "FlashAttention 3, paged": "FA3",
    "FlashInfer 0.6.12, tensor cores": "FlashInfer",
    "vLLM 0.11.0, Triton unified": "vLLM Triton",
    "SGLang 0.5.23, Triton": "SGLang Triton",
    "vLLM 0.24.0, CUDA v1": "CUDA v1",
    "vLLM 0.24.0, CUDA v2": "CUDA v2",
}
"""Of peers_kernels_h200.json, with the heads of their columns."""


def provenance(report: Report, *, names_command: bool = True) -> str:
    """What ran, when, on what."""
    environment = report["environment"]
    packages = environment["packages"]
    at = environment["commit"] or "no commit"
    commit = report.get("code") or f"simserve at {at[:12]}{'+' * at.endswith('+')}"
    command = f": `{' '.join(map(shown, report['command']))}`" if names_command else ""
    return (
        f"{environment['gpu']}, torch {packages['torch']}, Triton {packages['triton']}, {commit}, "
        f"{report['date'][:10]}{command}"
    )


def shown(word: str) -> str:
    return f"'{word}'" if re.search(r"[ *]", word) else word


def decode(report: Report) -> Iterator[str]:
    """µs a call by path, and the share of the read ceiling that `auto` reaches on `nhd`."""
    rows = {(row["case"], row["path"], row["layout"]): row for row in report["rows"]}
    yield f"{provenance(report)}; {report['ceilings']['read_gb_s']:,.0f} GB/s read in the same run."
    yield ""
    cells = [["case", *DECODE_COLUMNS, "auto, fp8", "of read"]]
    for case in dict.fromkeys(row["case"] for row in report["rows"]):
        if not case.startswith("decode"):
            continue
        found = [rows.get((case, *column)) for column in DECODE_COLUMNS.values()]
        fp8 = rows.get((f"fp8 KV {case}", "auto", "nhd"))
        cells.append([case, *map(microseconds, [*found, fp8]), percent(found[0], "read_ceiling")])
    yield from markdown_table(cells)


def writes(report: Report) -> Iterator[str]:
    """µs a call by layout."""
    rows = {
        (row["case"], row["layout"]): row for row in report["rows"] if row["path"] == "kv_write"
    }
    cells = [["case", "nhd", "packed"]]
    for case in dict.fromkeys(case for case, _ in rows):
        cells.append(
            [case, *(microseconds(rows.get((case, layout))) for layout in ("nhd", "packed"))]
        )
    yield from markdown_table(cells)


def prefill(report: Report) -> Iterator[str]:
    """µs and TFLOP/s of paged prefill on `nhd`."""
    peak = report["ceilings"]["matmul_tflop_s"]
    yield (
        f"{provenance(report)}; a bfloat16 matrix product of 8,192 reached {peak:,.0f} TFLOP/s in "
        "the same run."
    )
    yield ""
    cells = [["case", "calls", "µs", "TFLOP/s", "of matmul"]]
    for row in report["rows"]:
        if row["path"] in ("varlen", "split") and row["layout"] == "nhd":
            rate = f"{row['tflop_s']:,.0f}" if "tflop_s" in row else "–"
            share = percent(row, "matmul")
            cells.append([row["case"], row["path"], microseconds(row), rate, share])
    yield from markdown_table(cells)


def dense(report: Report) -> Iterator[str]:
    """Flash attention beside naive attention, each by its own counted bytes."""
    yield provenance(report, names_command=False) + "."
    yield ""
    rows = {(row["case"], row["path"]): row for row in report["rows"]}
    columns = ("µs", "MB moved", "peak MB")
    ways = ("flash", "naive")
    cells = [["case", "GFLOP", *(f"{way} {column}" for way in ways for column in columns)]]
    for case in dict.fromkeys(row["case"] for row in report["rows"] if row["path"] == "flash"):
        found = [rows.get((case, way)) for way in ways]
        cells.append([case, f"{found[0]['flops'] / 1e9:,.2f}"])
        for row in found:
            moved, peak = ((row or {}).get(key) for key in ("num_bytes", "peak_bytes"))
            cells[-1] += [microseconds(row), megabytes(moved), megabytes(peak)]
    yield from markdown_table(cells)


def peers(report: Report) -> Iterator[str]:
    """µs a call of our kernels on `nhd` beside others."""
    ours = {}
    for file in ("kernels_decode_h200.json", "kernels_prefill_h200.json"):
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            if row["layout"] == "nhd":
                ours[row["case"], "auto" if row["path"] == "varlen" else row["path"]] = row
    cells = [["case", "auto", "v1", "v2", *PEERS.values()]]
    for row in report["rows"]:
        case, others = row["case"], row["median_us"]
        mine = [microseconds(ours.get((case, path))) for path in ("auto", "v1", "v2")]
        found = (others.get(name) for name in PEERS)
        cells.append([case, *mine, *("–" if us is None else f"{us:,.1f}" for us in found)])
    yield from markdown_table(cells)


def counters(report: Report) -> Iterator[str]:
    """Bytes that kernels moved, by the hardware's counters."""
    yield provenance(report) + "."
    yield ""
    yield from counters_table(report)


def sampling(report: Report) -> Iterator[str]:
    """µs of samplers by batch."""
    yield provenance(report) + "."
    yield ""
    yield from sampling_table(report)


def steps(report: Report) -> Iterator[str]:
    """Whole steps by part."""
    yield f"{provenance(report, names_command=False)}; medians, ms."
    yield ""
    yield from markdown_table(step_cells(report["rows"]))


def real_and_simulated(report: Report) -> Iterator[str]:
    """One table a workload."""
    yield provenance(report)
    for name, run in report["runs"].items():
        yield ""
        yield f"{name}: {run['statement']}"
        yield ""
        rows = [Compared(*(row[field] for field in Compared._fields)) for row in run["rows"]]
        yield from markdown_table(percentile_cells(rows))


def host_share(report: Report) -> Iterator[str]:
    """Medians over all real steps by how many requests they had: what is not the GPU's time."""
    names = ("schedule", "update", "prepare", "forward", "sample", "sync")
    steps = [
        (number, dict(zip(names, parts, strict=True)))
        for run in report["runs"].values()
        for number, *parts in zip(
            run["real_steps"]["num_scheduled"],
            *(run["real_steps"][f"parts.{name}_s"] for name in names),
            strict=True,
        )
    ]
    cells = [["requests", "steps", *names, "host"]]
    for low, high in pairwise((1, 16, 64, 128, 256, 257)):
        found = [parts for number, parts in steps if low <= number < high]
        if not found:
            continue
        medians = [statistics.median(1e3 * parts[name] for parts in found) for name in names]
        host = statistics.median(
            1e3 * (sum(parts.values()) - parts["forward"] - parts["sample"]) for parts in found
        )
        label = f"{low}" if high == low + 1 else f"{low} to {high - 1}"
        cells.append([label, f"{len(found):,}", *(f"{ms:,.2f}" for ms in (*medians, host))])
    yield from markdown_table(cells)


def speculative(report: Report) -> Iterator[str]:
    """Steps of decodes by who drafts, what part that has in them, and how many tokens they give."""
    yield f"{provenance(report)}; medians, ms."
    yield ""
    parts = ["draft", "forward", "sample", "prepare"]
    cells = [["requests", "drafts", "k", "steps", "tokens", "step", *parts, "accepted", "a token"]]

    def place(row: Report) -> tuple[int, bool, str, int]:
        drafts = row["drafts"]
        return row["batch"], drafts != "none", drafts, row["num_speculative_tokens"]

    for row in sorted(report["rows"], key=place):
        k = row["num_speculative_tokens"]
        length = row.get("spec_decode_mean_acceptance_length", 1.0)
        times = [row["step_ms"], *(row.get(f"{part}_ms", 0.0) for part in parts)]
        cells.append(
            [
                str(row["batch"]),
                row["drafts"],
                *(str(k), str(row["num_steps"]), f"{row['num_tokens']:g}"),
                *(f"{one:.2f}" for one in (*times, length - 1, row["step_ms"] / length)),
            ]
        )
    yield from markdown_table(cells)


def shipped(profile: Report) -> list[str]:
    """Errors of a profile on steps that were held out of its fit."""
    errors = {
        column: {regime: RegimeError(**error) for regime, error in by_regime.items()}
        for column, by_regime in profile["errors"].items()
    }
    return markdown_table(error_cells(errors))


def microseconds(row: Report | None) -> str:
    return "–" if row is None or row.get("median_us") is None else f"{row['median_us']:,.1f}"


def percent(row: Report | None, of: str) -> str:
    value = (row or {}).get(f"percent_of_{of}")
    return "–" if value is None else f"{value:.0f} %"


def megabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.1f}"


TABLES: dict[str, tuple[str, Callable[[Report], Iterable[str]]]] = {
    "benchmarks/simulator.py": ("simulator.json", simulator_table),
    "kernels: decode": ("kernels_decode_h200.json", decode),
    "kernels: writes": ("kernels_decode_h200.json", writes),
    "kernels: prefill": ("kernels_prefill_h200.json", prefill),
    "kernels: dense": ("kernels_dense_h200.json", dense),
    "kernels: peers": ("peers_kernels_h200.json", peers),
    "kernels: sampling": ("kernels_sampling_h200.json", sampling),
    "kernels: counters": ("kernels_counters_h200.json", counters),
    "steps": ("real_steps_h200.json", steps),
    "speculative": ("speculative_h200.json", speculative),
    "real: host": ("real_vs_sim.json", host_share),
    "real and simulated": ("real_vs_sim.json", real_and_simulated),
    "real and simulated: drafts": ("real_drafts_h200.json", real_and_simulated),
    "calibrated: shipped": (f"{PROFILES}/h200-llama-3.1-8b-simserve.json", shipped),
    "calibrated: runs": ("calibrated_runs_h200.json", calibrated_runs_table),
    "calibrated: other host": ("calibrated_runs_other_host_h200.json", calibrated_runs_table),
    "calibrated: repeats": ("calibrated_repeats_h200.json", calibrated_repeats_table),
    "calibrated: slower": ("calibrated_runs_slower_gpu_h200.json", calibrated_runs_table),
    "calibrated: host known": ("calibrated_runs_h200.json", calibrated_host_table),
    "accuracy: transfer": ("accuracy.json", ACCURACY["transfer"]),
    "accuracy: cross": ("accuracy_cross.json", accuracy_cross_table),
    "accuracy: causes": ("accuracy_causes.json", accuracy_causes_table),
    "accuracy: repeats": ("accuracy_repeats.json", accuracy_repeats_table),
    "accuracy: steps 8B": ("accuracy.json", ACCURACY["steps 8B"]),
    "accuracy: blind 8B": ("accuracy.json", ACCURACY["blind 8B"]),
    "accuracy: host known 8B": ("accuracy.json", ACCURACY["host known 8B"]),
    "accuracy: hosts 8B": ("accuracy.json", ACCURACY["hosts 8B"]),
    "accuracy: followed 8B": ("accuracy.json", ACCURACY["followed 8B"]),
    "accuracy: with noise 8B": ("accuracy.json", ACCURACY["with noise 8B"]),
    "accuracy: roofline 8B": ("accuracy.json", ACCURACY["roofline 8B"]),
    "accuracy: steps 1B": ("accuracy.json", ACCURACY["steps 1B"]),
    "accuracy: blind 1B": ("accuracy.json", ACCURACY["blind 1B"]),
    "accuracy: host known 1B": ("accuracy.json", ACCURACY["host known 1B"]),
    "accuracy: hosts 1B": ("accuracy.json", ACCURACY["hosts 1B"]),
    "accuracy: followed 1B": ("accuracy.json", ACCURACY["followed 1B"]),
    "accuracy: with noise 1B": ("accuracy.json", ACCURACY["with noise 1B"]),
    "accuracy: roofline 1B": ("accuracy.json", ACCURACY["roofline 1B"]),
}
"""By name: the file of benchmarks/results, and what makes the lines of the table."""


def rewritten(page: str) -> str:
    """The page with every table as its result has it."""
    return BLOCK.sub(lambda found: found[1] + block(found[2]) + found[3], page)


def block(name: str) -> str:
    file, lines = TABLES[name]
    path = RESULTS / file
    if not path.exists():
        return "Not measured yet.\n"
    return "".join(f"{line}\n" for line in lines(json.loads(path.read_text())))


def main() -> None:
    """Write all tables anew; with --check, write none and exit with 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    arguments = parser.parse_args()
    stale = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        before = page.read_text()
        if (after := rewritten(before)) == before:
            continue
        stale.append(str(page.relative_to(ROOT)))
        if not arguments.check:
            page.write_text(after)
    if stale:
        print(f"{'out of date' if arguments.check else 'rewritten'}: {', '.join(stale)}")
    sys.exit(bool(stale) and arguments.check)


if __name__ == "__main__":
    main()
