"""Fits the profiles that ship, and measures how far they are from logs they were not fitted on.

    python benchmarks/accuracy.py FOLDER    # of step logs (docs/log-format.md has their format)
    python benchmarks/tables.py             # then the tables of docs/accuracy.md

Writes simserve/presets/profiles/*.json and benchmarks/results/accuracy.json. Which logs are fitted
and which are held out is said here, and in each profile by name and checksum.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

from accuracy_host import host_errors

from simserve.config.presets import load_gpu, load_model
from simserve.cost.noise import ResidualNoise
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import ProfileFile
from simserve.cost.roofline import RooflineCost
from simserve.fidelity.fit.prices import Prices
from simserve.fidelity.fit.profile import fit_profile
from simserve.fidelity.fit.residuals import step_errors_of
from simserve.fidelity.logs.loaded_log import LoadedLog, load_log
from simserve.fidelity.logs.vllm_log import StepLog, read_vllm_log
from simserve.fidelity.validate.judged_logs import group_repeats
from simserve.fidelity.validate.step_errors import (
    SLOWER_HOST,
    PricedSteps,
    errors_by_regime,
    price_log,
)
from simserve.fidelity.validate.validation import Validation
from simserve.fidelity.validate.workload import Timing, validate_workload
from simserve.protocols import CostModel
from simserve.report.markdown import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"
PROFILES = ROOT / "simserve" / "presets" / "profiles"
GPU = "h200"
MODELS = ("llama-3.1-8b", "llama-3.2-1b")
ATTENTION_PATH = "FlashAttention 3, CUDA graphs FULL_AND_PIECEWISE"
MEASURED_ON = (
    "vLLM 0.20.2, one process, synchronous scheduling; NVIDIA H200, torch 2.11.0+cu130; "
    "dummy weights in bfloat16; 2026-11-29"
)
FITTED = ("prefill_", "decode_", "m1b_prefill_", "m1b_decode_")
"""Logs whose names begin so, and these: of repeated workloads one run each."""
FITTED_TOO = (
    "ramp",
    "m1b_ramp",
    "chat_lognormal_2048",
    "poisson20_512_128_rep2",
    "multiturn_prefix_rep2",
    "long_on_2048_1024",
)
METRICS = (
    "ttft_p50",
    "ttft_p95",
    "ttft_p99",
    "itl_p50",
    "itl_p95",
    "itl_p99",
    "e2el_p50",
    "throughput",
)
NOISE_SEED = 0
LONG_LOG = 100
"""Steps of a log whose host can be followed."""
FEWEST_STEPS = 50
"""Of a regime that gets a row."""


def main() -> None:
    """Fit, simulate and judge the logs of a folder, and write all errors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    logs = [read_vllm_log(path) for path in sorted(parser.parse_args().folder.glob("*.json.gz"))]
    report: dict[str, Any] = {"measured_on": MEASURED_ON, "models": {}}
    report["transfer"] = [transfer(logs, *pair) for pair in permutations(MODELS)]
    spread: dict[str, dict[str, float]] = {}
    for model in MODELS:
        print(f"{model} ...", file=sys.stderr)
        profile = fit(logs, model)
        of_model = [log for log in logs if load_log(log).model == model]
        held_out = [log for log in of_model if not is_fitted(log)]
        report["models"][model] = accuracy(profile, held_out)
        report["models"][model]["hosts"] = [
            host_errors(profile, log, METRICS) for log in held_out if len(log.steps) >= LONG_LOG
        ]
        # Of the second model nothing was run twice: the first one's repeats stand for it.
        spread = repeat_spread(of_model, timing(profile)) or spread
        write(profile.model_copy(update={"repeat_spread": spread}))
    RESULTS.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def is_fitted(log: StepLog) -> bool:
    return log.name.startswith(FITTED) or log.name in FITTED_TOO


def fit(logs: Sequence[StepLog], model: str) -> ProfileFile:
    """The profile of a model, from the logs of all models; it is written, so that it has a path."""
    loaded = [(is_fitted(log), load_log(log)) for log in logs]
    profile = fit_profile(
        [log for fitted, log in loaded if fitted],
        [log for fitted, log in loaded if not fitted],
        name=f"{GPU}-{model}-vllm",
        model=model,
        attention_path=ATTENTION_PATH,
        measured_on=MEASURED_ON,
    )
    write(profile)
    return profile


def transfer(logs: Sequence[StepLog], source: str, target: str) -> dict[str, Any]:
    """Errors on a model's held-out logs after a fit that saw the other model's logs alone."""

    def of(model: str, fitted: bool) -> list[LoadedLog]:
        loaded = [load_log(log) for log in logs if is_fitted(log) == fitted]
        return [log for log in loaded if log.model == model]

    profile = fit_profile(of(source, True), [], name="transfer", model=source)
    errors = step_errors_of(of(target, False), Prices.of(profile))
    found = {way: by_regime["all"].model_dump() for way, by_regime in errors.items()}
    return {"fitted": source, "priced": target, **found}


def write(profile: ProfileFile) -> None:
    PROFILES.mkdir(exist_ok=True)
    text = profile.model_dump_json(indent=1) + "\n"
    (PROFILES / f"{profile.name}.json").write_text(text)


def timing(profile: ProfileFile, seed: int | None = None) -> Timing:
    """The profile, with noise if there is a seed."""

    def cost(host_scale: float) -> CostModel:
        model, gpu = load_model(profile.model), load_gpu(GPU)
        plain = ProfileCost(model, gpu, name=profile.name, host_scale=host_scale)
        return plain if seed is None else ResidualNoise(plain, seed)

    return Timing(name=profile.name, cost=cost, fitted_on=tuple(log.name for log in profile.fitted))


def roofline(model: str) -> Timing:
    return Timing(
        name="roofline", cost=lambda host_scale: RooflineCost(load_model(model), load_gpu(GPU))
    )


def accuracy(profile: ProfileFile, held_out: Sequence[StepLog]) -> dict[str, Any]:
    """Errors of steps and of latencies on logs that were not fitted, in every way of pricing."""
    groups = group_repeats(held_out)
    alone = [[log] for log in held_out]
    ways: dict[str, tuple[Timing, float | None, list[list[StepLog]]]] = {
        "blind": (timing(profile), 1.0, groups),
        "with noise": (timing(profile, NOISE_SEED), 1.0, groups),
        "host known": (timing(profile), None, alone),
        "roofline": (roofline(profile.model), 1.0, groups),
    }
    latencies: dict[str, list[dict[str, Any]]] = {}
    steps: dict[str, Any] = {}
    for way, (times, host_scale, workloads) in ways.items():
        print(f"  {way}", file=sys.stderr)
        found = [validate_workload(group, times, host_scale=host_scale) for group in workloads]
        latencies[way] = [latency_errors(one) for one in found]
        if way != "with noise":
            priced = list(price(found, workloads, times))
            steps[way] = {name: one._asdict() for name, one in errors_by_regime(priced).items()}
    return {
        "profile": profile.name,
        "fitted": [log.model_dump() for log in profile.fitted],
        "held_out": [log.model_dump() for log in profile.held_out],
        "steps": steps,
        "latencies": latencies,
    }


def price(
    found: Sequence[Validation], workloads: Sequence[Sequence[StepLog]], times: Timing
) -> Iterator[PricedSteps]:
    for one, logs in zip(found, workloads, strict=True):
        for log in logs:
            scales = one.host_scale, one.host_scale * SLOWER_HOST
            yield price_log(log, *map(times.cost, scales))


def latency_errors(one: Validation) -> dict[str, Any]:
    """A workload's relative errors, each with the relative spread of the real engine's repeats."""
    cells = {cell.name: cell for cell in one.cells}
    return {
        "logs": list(one.logs),
        "host_scale": round(one.host_scale, 3),
        "near_saturation": one.near_saturation,
        "errors": {name: rounded(cells[name].error) for name in METRICS},
        "spread": {name: rounded(cells[name].spread) for name in METRICS},
    }


def repeat_spread(logs: Sequence[StepLog], times: Timing) -> dict[str, dict[str, float]]:
    """Half range over mean of repeats, the mean over the workloads of each load regime."""
    found: dict[str, list[Mapping[str, float]]] = {}
    for group in group_repeats(logs):
        if len(group) > 1:
            one = validate_workload(group, times)
            regime = "near_saturation" if one.near_saturation else "below"
            found.setdefault(regime, []).append({cell.name: cell.spread for cell in one.cells})
    return {
        regime: {name: rounded(sum(s[name] for s in spreads) / len(spreads)) for name in spreads[0]}
        for regime, spreads in found.items()
    }


def rounded(value: float | None) -> Any:
    return None if value is None else round(value, 4)


def step_table(model: str, report: Mapping[str, Any]) -> list[str]:
    """A row a regime; error and bias in every way of pricing."""
    steps = report["models"][model]["steps"]
    cells = [["steps", "number", *(f"{way}: {e}" for way in steps for e in ("MAPE", "bias"))]]
    for regime, blind in steps["blind"].items():
        if blind["num_steps"] < FEWEST_STEPS:
            continue
        numbers = []
        for errors in steps.values():
            one = errors.get(regime)
            numbers += ["–", "–"] if one is None else [percent(one["mape"]), signed(one["bias"])]
        cells.append([regime, f"{blind['num_steps']:,}", *numbers])
    return markdown_table(cells)


def latency_table(model: str, way: str, report: Mapping[str, Any]) -> list[str]:
    """A row a workload; errors, and beside them in brackets how far apart repeats are."""
    cells = [["workload", *(name.replace("_", " ").upper() for name in METRICS)]]
    for one in report["models"][model]["latencies"][way]:
        near = " (near saturation)" if one["near_saturation"] else ""
        scale = f", host {one['host_scale']:.2f}" if way == "host known" else ""
        errors, spread, repeats = one["errors"], one["spread"], len(one["logs"])
        row = [
            signed(errors[name]) + (f" (±{100 * spread[name]:.0f})" if repeats > 1 else "")
            for name in METRICS
        ]
        cells.append([f"{one['logs'][0]}{scale}{near}", *row])
    return markdown_table(cells)


def host_table(model: str, report: Mapping[str, Any]) -> list[str]:
    """A row a log: error of its steps by what is known of its host."""
    cells = [["log", "factor", "steps: MAPE", "best factor", "MAPE", "followed: MAPE", "bias"]]
    for one in report["models"][model]["hosts"]:
        factors, steps = one["factors"], one["steps"]
        row = [one["log"]]
        for way in ("told", "best"):
            row += [f"{factors[way]:.2f}", percent(steps[way]["mape"])]
        followed = steps["followed"]
        cells.append([*row, percent(followed["mape"]), signed(followed["bias"])])
    return markdown_table(cells)


def followed_table(model: str, report: Mapping[str, Any]) -> list[str]:
    """A row a log: errors of latencies on a host that is as fast as it was in the log."""
    cells = [["workload", *(name.replace("_", " ").upper() for name in METRICS)]]
    for one in report["models"][model]["hosts"]:
        cells.append([one["log"], *(signed(one["errors"][name]) for name in METRICS)])
    return markdown_table(cells)


def transfer_table(report: Mapping[str, Any]) -> list[str]:
    """A row a pair of models."""
    cells = [["fitted on", "priced", "steps", "blind: MAPE", "bias", "host known: MAPE", "bias"]]
    for one in report["transfer"]:
        row = [one["fitted"], one["priced"], f"{one['blind']['num_steps']:,}"]
        for way in ("blind", "host_known"):
            row += [percent(one[way]["mape"]), signed(one[way]["bias"])]
        cells.append(row)
    return markdown_table(cells)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def signed(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f} %".replace("-", "−")


SIZES = {"8B": "llama-3.1-8b", "1B": "llama-3.2-1b"}
WAYS = ("blind", "with noise", "host known", "roofline")
TABLES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = (
    {"transfer": transfer_table}
    | {f"hosts {size}": partial(host_table, model) for size, model in SIZES.items()}
    | {f"followed {size}": partial(followed_table, model) for size, model in SIZES.items()}
    | {f"steps {size}": partial(step_table, model) for size, model in SIZES.items()}
    | {
        f"{way} {size}": partial(latency_table, model, way)
        for size, model in SIZES.items()
        for way in WAYS
    }
)
"""The tables of docs/accuracy.md."""


if __name__ == "__main__":
    main()
