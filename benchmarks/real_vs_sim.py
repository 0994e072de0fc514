"""Runs on a GPU beside simulated ones, as one JSON file.

    python benchmarks/real_vs_sim.py                                   # the quick start
    python benchmarks/real_vs_sim.py --azure AzureLLMInferenceTrace_conv.csv
    python benchmarks/real_vs_sim.py --config configs/real_drafts.yaml --out FILE.json

Beside the quick start 256 requests arrive at once, so that full batches are seen; `--azure` adds a
minute of Azure's conversation trace. `--config` runs another configuration, and nothing else. Each
is one `simserve run --real-gpu`; kept are the table real / simulated / error and the samples behind
it: TTFT and E2EL of every request, and duration and parts of every real step, what a roofline says
of that step among them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from simserve.config.environment import collect
from simserve.metrics.result import RunResult
from simserve.metrics.rundir import read_run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "real_vs_sim.json"
SIMSERVE = (sys.executable, "-c", "from simserve.cli.main import main; main()")
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
AT_ONCE = {
    "num_requests": 256,
    "arrival": {"kind": "immediate"},
    "prompt_len": {"kind": "constant", "value": 512},
    "output_len": {"kind": "constant", "value": 64},
}
SLICE_S = 60
SHADOW = "executor.shadow={cost: {kind: roofline}}"


def main() -> None:
    """Run each workload for real and simulated, and write the report after each."""
    arguments = parse()
    report: dict[str, Any] = {
        "command": command(arguments),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": collect(),
        "runs": {},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name, config, overrides in workloads(arguments):
        print(f"{name} ...", file=sys.stderr)
        report["runs"][name] = run(config, [*overrides, *arguments.override])
        arguments.out.write_text(json.dumps(report, ensure_ascii=False) + "\n")


def parse() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--azure", type=Path, metavar="FILE.csv", help="Azure's conversation trace")
    parser.add_argument("--start-s", type=float, default=0.0, help="where its minute begins")
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="run this one instead")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.json")
    parser.add_argument("-o", dest="override", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def command(arguments: argparse.Namespace) -> list[str]:
    """The command line; of the trace its name, since folders are a matter of the machine."""
    words = ["python", "benchmarks/real_vs_sim.py"]
    if arguments.config:
        words += ["--config", arguments.config.as_posix()]
    elif arguments.azure:
        words += ["--azure", arguments.azure.name, "--start-s", f"{arguments.start_s:g}"]
    return words + [word for override in arguments.override for word in ("-o", override)]


def workloads(arguments: argparse.Namespace) -> Iterator[tuple[str, Path, list[str]]]:
    """Name, configuration and overrides of each run."""
    azure, start_s = arguments.azure, arguments.start_s
    if arguments.config:
        yield arguments.config.as_posix(), arguments.config, []
        return
    yield "configs/quickstart.yaml", QUICKSTART, []
    override = f"workload={json.dumps({'synthetic': AT_ONCE})}"
    yield "256 requests of 512 tokens in and 64 out, at once", QUICKSTART, [override]
    if azure:
        trace = {"path": str(azure.resolve()), "start_s": start_s, "end_s": start_s + SLICE_S}
        override = f"workload={json.dumps({'trace': trace})}"
        yield f"{SLICE_S} s of {azure.name} from {start_s:g} s", QUICKSTART, [override]


def run(config: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One process. A run that fails ends everything; what ran before it is kept."""
    words = [word for o in (SHADOW, *overrides, "metrics.plot=false") for word in ("-o", o)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [*SIMSERVE, "run", str(config), "--real-gpu", *words, "--out", str(out)]
        subprocess.run(words, check=True)
        validation: Mapping[str, Any] = json.loads((out / "validation.json").read_text())
        real, simulated = read_run(out), read_run(out / "simulated")
    return {
        **validation,
        "overrides": [o for o in overrides if not o.startswith("workload=")],
        "samples": {"real": samples(real), "simulated": samples(simulated)},
        "real_steps": columns(real.steps_table, "duration_s", "num_tokens", "num_scheduled")
        | {
            name: columns(real.steps_table, name)[name]
            for name in real.steps_table.column_names
            if name.startswith("parts.")
        },
    }


def samples(result: RunResult) -> dict[str, list[float | None]]:
    return columns(result.requests_table, "ttft_ms", "e2el_ms", "input_length", "output_length")


def columns(table: Any, *names: str) -> dict[str, list[float | None]]:
    """Columns as lists, rounded to a microsecond (a nanosecond of a millisecond column)."""
    return {
        name: [None if v is None else round(v, 6) for v in table[name].to_pylist()]
        for name in names
    }


if __name__ == "__main__":
    main()
