"""Runs of the real executor, three of each, beside their simulation with a calibrated profile.

    simserve calibrate --out profile.json
    python benchmarks/calibrated_runs.py --profile profile.json
    python benchmarks/calibrated_runs.py --profile profile.json --again FILE.json   # needs no GPU

Loads are shares of a workload's capacity: the request rate at which the profile says that it is
served if all of it is there at once. `--again` simulates anew what FILE holds real runs of.

Each workload is simulated twice: with the profile alone, and with the host of the three runs, whose
speed is told by what their steps took of it (one factor on the profile's host times).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from simserve import api
from simserve.config.build_real import open_machine
from simserve.config.environment import collect
from simserve.config.loader import LoadedConfig, load_config
from simserve.cost.profile_file import load_profile
from simserve.metrics.arrow import column
from simserve.metrics.result import RunResult
from simserve.report.markdown import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "calibrated_runs_h200.json"
REPEATS = 3
BURST = 1000
"""Requests at once that tell the capacity: so many that the last ones' decodes do not matter."""
LEAST_LIMIT = 0.03
METRICS = [f"p{p}_{name}_ms" for name in ("ttft", "itl", "e2el") for p in (50, 95, 99)]
KEYS = [*METRICS, "output_throughput", "duration", "num_steps", "num_preemptions", "completed"]
JUDGED = [*METRICS, "output_throughput"]
HOST_PARTS = ("prepare", "sample", "sync")
AT_ONCE = {"kind": "immediate"}

Report = dict[str, Any]


def lognormal(mean: int, sigma: float, most: int) -> dict[str, object]:
    return {"kind": "lognormal", "mean": mean, "sigma": sigma, "min": 1, "max": most}


SHORT = {"prompt_len": lognormal(200, 0.6, 1024), "output_len": lognormal(60, 0.6, 256)}
CHAT = {"prompt_len": lognormal(700, 1.0, 4096), "output_len": lognormal(120, 0.8, 512)}
WORKLOADS: dict[str, dict[str, Any]] = {
    "short prompts, 30 %": {"load": 0.3, "synthetic": SHORT},
    "chat, 70 %": {"load": 0.7, "synthetic": CHAT},
    "chat, 110 %": {"load": 1.1, "synthetic": CHAT},
    "long beside short, threshold 512, 90 %": {
        "load": 0.9,
        "scheduler": {"long_prefill_token_threshold": 512},
        "synthetic": {
            "output_len": lognormal(60, 0.6, 256),
            "classes": [
                {"name": "short", "weight": 9, "prompt_len": lognormal(200, 0.6, 1024)},
                {"name": "long", "weight": 1, "prompt_len": lognormal(5000, 0.3, 8192)},
            ],
        },
    },
    "conversations, 50 %": {
        "load": 0.5,
        "synthetic": {
            "prompt_len": lognormal(250, 0.7, 1024),
            "output_len": lognormal(80, 0.6, 256),
            "shared_prefix": {"num_groups": 4, "prefix_len": {"kind": "constant", "value": 512}},
            "sessions": {
                "num_sessions": 40,
                "turns": {"kind": "constant", "value": 4},
                "think_time_s": 0.3,
            },
        },
    },
}


def main() -> None:
    """Run or read the runs, simulate and judge each workload, and write the report."""
    arguments = parse()
    if arguments.again:
        report = json.loads(arguments.again.read_text())
        report["profile"] = profile_facts(arguments.profile)
        report["simulated_again"] = datetime.now(UTC).isoformat(timespec="seconds")
        for found in report["runs"].values():
            found["simulated"] = simulated(found, arguments)
            for run in found["real"]:  # priced by the profile that was there when it ran
                for name in ("step_mape", "step_bias"):
                    run.pop(name, None)
    else:
        report = measure(arguments)
    for found in report["runs"].values():
        judge(found, arguments)
    write(report, arguments)
    print("\n".join([*table(report), "", *table(report, "host_known")]))


def parse() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--model", default="llama-3.1-8b", help="preset, or a config.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.json")
    parser.add_argument("--run-s", type=float, default=25.0, help="length of each run")
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds; ends early then")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="the directories of all real runs")
    parser.add_argument("--again", type=Path, metavar="FILE.json", help="simulate these anew")
    parser.add_argument("-o", dest="override", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Report:
    """Repeats take turns, so that what drifts is part of the spread; kept after every run."""
    began = perf_counter()
    report: Report = {
        "command": ["python", "benchmarks/calibrated_runs.py", "--profile", arguments.profile.name],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": collect(),
        "profile": profile_facts(arguments.profile),
        "runs": {},
    }
    machine = open_machine(load(arguments, {"synthetic": {}}, {}))
    print(f"ready after {perf_counter() - began:.0f} s", file=sys.stderr)
    longest_s = 0.0
    try:
        for repeat in range(REPEATS):
            for name, spec in WORKLOADS.items():
                start = perf_counter()
                if start - began + longest_s > arguments.time_limit:
                    return report
                found = report["runs"].setdefault(name, {})
                if not found:
                    found |= plan(spec, arguments, machine.num_gpu_blocks)
                loaded = load(arguments, found["workload"], found["scheduler"])
                result = api.run(loaded, machine=machine)
                if compiled_steps(result):
                    print(f"{name}: compiled {compiled_steps(result)}, again", file=sys.stderr)
                    result = api.run(loaded, machine=machine)
                found["real"].append(kept(result))
                found["rows"] = rows(found["real"], found["simulated"])
                if arguments.keep:
                    result.save(arguments.keep / f"{name} {repeat}")
                write(report, arguments)
                longest_s = max(longest_s, perf_counter() - start)
                print(f"{name}: {perf_counter() - start:.1f} s", file=sys.stderr)
    finally:
        machine.close()
    return report


def profile_facts(path: Path) -> Report:
    """What was measured, and the errors on the steps that were not fitted."""
    profile = load_profile(path=path)
    return {
        "name": profile.name,
        "measured_on": profile.measured_on,
        "attention_path": profile.attention_path,
        "steps": {log.name: log.num_steps for log in (*profile.fitted, *profile.held_out)},
        "errors": {name: e.model_dump() for name, e in profile.errors["blind"].items()},
    }


def plan(spec: Mapping[str, Any], arguments: argparse.Namespace, num_gpu_blocks: int) -> Report:
    """The workload at its load, as long as a run may be, and its simulation."""
    synthetic, scheduler = dict(spec["synthetic"]), spec.get("scheduler", {})
    sessions = synthetic.get("sessions")
    found: Report = {"load": spec["load"], "scheduler": scheduler, "num_gpu_blocks": num_gpu_blocks}
    burst = {**synthetic, "arrival": AT_ONCE}
    if sessions:
        burst["sessions"] = {**sessions, "num_sessions": BURST // 4, "think_time_s": 0.0}
    else:
        burst["num_requests"] = BURST
    capacity = simulated({**found, "workload": {"synthetic": burst}}, arguments)
    rate = spec["load"] * capacity["request_throughput"]
    if sessions:
        rate /= sessions["turns"]["value"]
        number = max(4, round(rate * arguments.run_s))
        synthetic["sessions"] = {**sessions, "num_sessions": number}
    else:
        synthetic["num_requests"] = max(10, round(rate * arguments.run_s))
    synthetic["arrival"] = {"kind": "poisson", "rate": float(f"{rate:.4g}")}
    found |= {"workload": {"synthetic": synthetic}, "real": []}
    found["simulated"] = simulated(found, arguments)
    return found


def load(
    arguments: argparse.Namespace,
    workload: Mapping[str, Any],
    scheduler: Mapping[str, Any],
    host_scale: float = 1.0,
) -> LoadedConfig:
    """A real run whose shadow is priced by the profile, on a host slower by `host_scale`."""
    model = arguments.model
    path = str(arguments.profile.resolve())
    cost = {"kind": "profile", "path": path, "host_scale": host_scale}
    config = {
        "model": {"config": model} if model.endswith(".json") else model,
        "gpu": load_profile(path=arguments.profile).gpu,
        "workload": dict(workload),
        "executor": {"kind": "real", "device": arguments.device, "shadow": {"cost": cost}},
        "scheduler": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, **scheduler},
        "metrics": {"percentiles": [50, 95, 99]},
    }
    return load_config(config, arguments.override)


def simulated(
    found: Mapping[str, Any], arguments: argparse.Namespace, host_scale: float = 1.0
) -> dict[str, Any]:
    """The summary of the same configuration on the profile."""
    from simserve.fidelity.validate.real_gpu import simulated_twin

    loaded = load(arguments, found["workload"], found["scheduler"], host_scale)
    return kept(api.run(simulated_twin(loaded, {"num_gpu_blocks": found["num_gpu_blocks"]})))


def kept(result: RunResult) -> dict[str, Any]:
    """What is compared, and of a real run how far the profile is off on its very steps."""
    summary = {key: result.summary_dict.get(key) for key in [*KEYS, "request_throughput"]}
    steps = result.steps_table
    if "parts.shadow_s" in steps.column_names:
        some = column(steps, "num_tokens") > 0
        measured, priced = (column(steps, n)[some] for n in ("duration_s", "parts.shadow_s"))
        summary["compiled_steps"] = compiled_steps(result)
        summary["step_mape"] = float(np.mean(np.abs(priced / measured - 1.0)))
        summary["step_bias"] = float(priced.sum() / measured.sum() - 1.0)
        summary["host"] = host_of(steps)
    return summary


def host_of(steps: Any) -> dict[str, float]:
    """Steps, those with prefills, the requests in all, and what they took of the host beside
    scheduling."""
    num_reqs, num_tokens = column(steps, "num_scheduled"), column(steps, "num_tokens")
    ran = num_tokens > 0
    return {
        "steps": int(ran.sum()),
        "mixed": int((num_tokens > num_reqs).sum()),
        "requests": int(num_reqs[ran].sum()),
        "seconds": float(sum(column(steps, f"parts.{p}_s")[ran].sum() for p in HOST_PARTS)),
    }


def host_scale(real: list[dict[str, Any]], profile: Path) -> float:
    """How much longer the host of some runs took than that of the profile; 1: they do not tell."""
    told = [run["host"] for run in real if "mixed" in run.get("host", ())]
    if not told:
        return 1.0
    c = load_profile(path=profile).coefficients
    steps, mixed, requests, seconds = (sum(one[k] for one in told) for k in told[0])
    priced_s = c["inputs_step_s"] * steps + c["inputs_mixed_s"] * mixed
    return seconds / (priced_s + c["inputs_request_s"] * requests)


def judge(found: Report, arguments: argparse.Namespace) -> None:
    """Set the real runs beside both simulations."""
    real, scale = found["real"], host_scale(found["real"], arguments.profile)
    found["rows"] = rows(real, found["simulated"])
    found["host_scale"] = scale
    found["host_known"] = rows(real, simulated(found, arguments, scale))


def compiled_steps(result: RunResult) -> int:
    """Steps in which something was compiled: they are slow once, and requests waited for them."""
    steps = result.steps_table
    name = "parts.first_shape"
    return int((column(steps, name) > 0).sum()) if name in steps.column_names else 0


def rows(real: list[dict[str, Any]], simulation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Spread is half the range over the mean."""
    found = []
    for key in JUDGED:
        values = np.array([run[key] for run in real], dtype=float)
        spread = float((values.max() - values.min()) / 2 / values.mean())
        error = float(simulation[key] / values.mean() - 1.0)
        found.append(
            {
                "key": key,
                "real": float(values.mean()),
                "spread": spread,
                "simulated": simulation[key],
                "error": error,
                "within": abs(error) <= max(LEAST_LIMIT, spread),
            }
        )
    return found


def shown_keys() -> dict[str, str]:
    """The numbers of a table, and their headings."""
    names = {
        f"p{p}_{name}_ms": f"{name.upper()} p{p}" for name in ("ttft", "itl") for p in (50, 95, 99)
    }
    return names | {"p50_e2el_ms": "E2EL p50", "output_throughput": "throughput"}


def table(report: Report, which: str = "rows") -> Iterable[str]:
    """A row a workload: error, and in brackets the real runs' own spread.

    `host_known`: with the host's factor in the place of the steps' bias.
    """
    names = shown_keys()
    known = which == "host_known"
    has_steps = all("step_bias" in run for f in report["runs"].values() for run in f["real"])
    last = ["host"] if known else ["all steps"] if has_steps else []
    cells = [["workload", "runs", *names.values(), *last]]
    for workload, found in report["runs"].items():
        by_key = {row["key"]: row for row in found[which]}
        row = [workload, str(len(found["real"])), *(judged(by_key[key]) for key in names)]
        if known:
            row.append(f"× {found['host_scale']:.2f}")
        elif has_steps:
            row.append(percent(float(np.mean([run["step_bias"] for run in found["real"]]))))
        cells.append(row)
    return markdown_table(cells)


def host_table(report: Report) -> Iterable[str]:
    """As `table`, with the host of the runs."""
    return table(report, "host_known")


def judged(row: Mapping[str, Any]) -> str:
    text = f"{percent(row['error'])} ({100 * row['spread']:.1f})"
    return text if row["within"] else f"**{text}**"


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %".replace("-", "−")


def write(report: Report, arguments: argparse.Namespace) -> None:
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
