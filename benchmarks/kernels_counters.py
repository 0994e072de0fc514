"""What the hardware's counters say of the kernels: bytes between the chip and its memory, and load.

    python benchmarks/kernels_counters.py [--cases 'dense 2048*' ...] [--json F]

Needs a GPU and NVIDIA's `ncu`, which runs this file again and counts each kernel of one call.
Caches are flushed before each kernel; the bytes of a call are the sum over its kernels.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from simserve.cli.measurement import write_measurement
from simserve.executor.real.bench.kernel_cases import CASES, DEFAULT_WAYS, AttentionCase, Case
from simserve.report.markdown import markdown_table

METRICS = {
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "time_us": "gpu__time_duration.sum",
    "percent_of_dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "percent_of_l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "percent_of_l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "percent_of_warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "percent_of_issue_slots": "sm__inst_issued.avg.pct_of_peak_sustained_active",
}
PATTERNS = (
    "decode b64 ctx2048",
    "decode b64 ctx8192",
    "decode b256 ctx512",
    "fp8 KV decode b64 ctx2048",
    "prefill 8192",
    "fp8 KV prefill 8192",
    "dense 2048 *",
    "dense 8192 d128 bfloat16",
    "dense 1 @ [28]*",
)
SEPARATOR = "FillFunctor"  # of the kernel that stands before each call


def cases(patterns: list[str]) -> Iterator[Case]:
    fp8 = AttentionCase(name="fp8 KV prefill 8192", seqs=((8192, 8192),), kv_dtype="float8_e4m3fn")
    for name, case in {**CASES, fp8.name: fp8}.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            yield case


def run_once(patterns: list[str]) -> None:
    """Call every way of every case once between the profiler's marks, once before them."""
    import torch

    from simserve.executor.real.bench.kernel_calls import work_of

    mark = torch.empty(1 << 20, device="cuda")
    for case in cases(patterns):
        for work in work_of(case, "nhd", DEFAULT_WAYS, "cuda", 1):
            work.calls[0]()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            mark.fill_(1.0)
            work.calls[0]()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            print("counted", case.name, work.way, work.num_bytes, work.flops or 0, sep="|")
        torch.cuda.empty_cache()


def measured(patterns: list[str]) -> list[dict[str, Any]]:
    """What `ncu` counts, a row a case and way; ends this program if it fails."""
    command = [
        "ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units",
        "base", "--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--once",
        "--cases", *patterns,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = done.stdout.splitlines()
    counted = [line.split("|")[1:] for line in lines if line.startswith("counted|")]
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    calls = list(split_calls(table))
    if len(calls) != len(counted):
        raise SystemExit(f"ncu saw {len(calls)} calls of {len(counted)}")
    return [
        {
            "case": name,
            "path": way,
            "counted_bytes": int(num_bytes),
            "flops": int(flops),
            "kernels": call,
        }
        for (name, way, num_bytes, flops), call in zip(counted, calls, strict=True)
    ]


def split_calls(table: csv.DictReader[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the kernels of each call; ncu has a line for each metric of each kernel."""
    short = {metric: name for name, metric in METRICS.items()}
    calls: list[dict[str, dict[str, Any]]] = []
    for line in table:
        if SEPARATOR in line["Kernel Name"]:
            if not calls or calls[-1]:
                calls.append({})
            continue
        kernel = calls[-1].setdefault(line["ID"], {"kernel": line["Kernel Name"].split("(")[0]})
        value = float(line["Metric Value"].replace(",", ""))
        name = short[line["Metric Name"]]
        kernel[name] = value / 1e3 if name == "time_us" else value
    return (list(call.values()) for call in calls)


def total(row: Mapping[str, Any], key: str) -> float:
    return sum(kernel[key] for kernel in row["kernels"])


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """Bytes by the counters beside the counted ones, and the load of a call's longest kernel."""
    cells = [["case", "path", "MB read", "MB written", "MB counted", "DRAM", "L2", "L1", "warps"]]
    for row in report["rows"]:
        longest = max(row["kernels"], key=lambda kernel: float(kernel["time_us"]))
        megabytes = [total(row, key) for key in ("read_bytes", "written_bytes")]
        cells.append([row["case"], row["path"]])
        cells[-1] += [f"{value / 1e6:,.1f}" for value in (*megabytes, row["counted_bytes"])]
        for unit in ("dram", "l2", "l1", "warps"):
            cells[-1].append(f"{longest[f'percent_of_{unit}']:.0f} %")
    yield from markdown_table(cells)


def main() -> None:
    """Count what the kernels do under ncu, print it, and write it; --once is what ncu runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(PATTERNS), metavar="PATTERN")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        run_once(arguments.cases)
        return
    rows = measured(arguments.cases)
    print("\n".join(table({"rows": rows})))
    write_measurement(arguments.json, ["python", *sys.argv], {"rows": rows})


if __name__ == "__main__":
    main()
