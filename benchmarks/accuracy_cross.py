"""Errors on the steps of each kind of workload, after a fit of the logs of all other kinds.

    python benchmarks/accuracy_cross.py FOLDER    # of step logs (docs/log-format.md)
    python benchmarks/tables.py                   # then the table of docs/accuracy.md

Writes benchmarks/results/accuracy_cross.json. No profile that ships comes from these fits.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import LONG_LOG

from simserve.fidelity.fit.host import engine_seconds
from simserve.fidelity.fit.host_speed import host_scale, local_host_scale
from simserve.fidelity.fit.prices import Prices
from simserve.fidelity.fit.profile import fit_profile
from simserve.fidelity.logs.loaded_log import LoadedLog, load_log
from simserve.fidelity.logs.vllm_log import read_vllm_log
from simserve.fidelity.validate.step_errors import StepError
from simserve.report.markdown import markdown_table

RESULTS = Path(__file__).resolve().parent / "results" / "accuracy_cross.json"
WAYS = ("blind", "host known", "followed")
KIND = re.compile(r"(m1b_)?[a-z]+")
"""What a log's name says of its workload: all before its first size or second word."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    paths = sorted(parser.parse_args().folder.glob("*.json.gz"))
    logs = [load_log(read_vllm_log(path)) for path in paths]
    kinds = sorted({(log.model, kind_of(log)) for log in logs}, reverse=True)
    report = [left_out(logs, model, kind) for model, kind in kinds]
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


def kind_of(log: LoadedLog) -> str:
    found = KIND.match(log.name)
    if found is None:
        raise SystemExit(f"{log.name}: a log's name begins with its kind of workload")
    # Two loads of one process are two kinds: one of them is near saturation.
    return log.name.split("_")[0] if log.name.startswith("poisson") else found[0]


def left_out(logs: Sequence[LoadedLog], model: str, kind: str) -> dict[str, Any]:
    """Errors on all logs of a kind, none of which was fitted."""
    unseen = [log for log in logs if kind_of(log) == kind]
    fitted = [log for log in logs if kind_of(log) != kind]
    profile = fit_profile(fitted, [], name="cross", model=model)
    errors: dict[str, Any] = {}
    for way in WAYS:
        seen = [log for log in unseen if way != "followed" or len(log.steps) >= LONG_LOG]
        if seen:
            errors[way] = error(seen, Prices.of(profile), way)._asdict()
    return {"model": model, "kind": kind, "logs": [log.name for log in unseen], "errors": errors}


def error(logs: Sequence[LoadedLog], prices: Prices, way: str) -> StepError:
    """Of the steps of some logs, under one kind of knowledge of their host."""
    predicted = []
    for log in logs:
        engine_s = engine_seconds(prices.coefficients, log.steps)
        scale: Any = {
            "blind": 1.0,
            "host known": host_scale(log.steps, engine_s),
            "followed": local_host_scale(log.steps, engine_s),
        }[way]
        predicted.append(prices.predict(log, scale))
    return StepError.of(
        np.concatenate(predicted), np.concatenate([log.steps.duration_s for log in logs])
    )


def table(report: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row a kind that is left out."""
    head = [f"{way}: {what}" for way in WAYS for what in ("MAPE", "bias")]
    cells = [["not fitted", "model", "logs", "steps", *head]]
    for one in report:
        errors = one["errors"]
        numbers = [text for way in WAYS for text in shown(errors.get(way))]
        steps = f"{errors['blind']['num_steps']:,}"
        kind = one["kind"].removeprefix("m1b_")
        cells.append([kind, one["model"], str(len(one["logs"])), steps, *numbers])
    return markdown_table(cells)


def shown(one: Mapping[str, float] | None) -> tuple[str, str]:
    if one is None:
        return "–", "–"
    return f"{100 * one['mape']:.1f} %", f"{100 * one['bias']:+.1f} %".replace("-", "−")


if __name__ == "__main__":
    main()
