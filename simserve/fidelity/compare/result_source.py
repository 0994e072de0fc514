"""Opens what `compare` is given: a run directory, a step log, or a result somebody wrote down.

A result file is one JSON object (or a list of one, as `vllm bench serve` and summary.json have it):
numbers under any names, and `engine`, `config` and a number of hit tokens if they were recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simserve.errors import RunDirectoryError, why_unreadable
from simserve.fidelity.compare.step_shapes import StepShapes
from simserve.fidelity.logs.measured import METRICS, STATISTICS, measured_log
from simserve.fidelity.logs.vllm_log import StepLog, read_vllm_log
from simserve.metrics.options import Scalar
from simserve.metrics.result import RunResult
from simserve.metrics.rundir import read_run

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Result", "load_result"]

HIT_TOKENS = ("total_cached_tokens", "num_cached_tokens", "prefix_cache_hits")
"""Keys of a summary that tell how many tokens were found in the prefix cache; the first counts."""
_NO_SETTINGS = ("metrics", "seed", "label", "metadata")
"""Parts of a configuration that do not change what happens, or only which repetition it is."""
_FLAT = ("scheduler", "kv_cache")
"""Parts whose keys are the engine's own arguments and go by their bare names."""
_NO_NUMBERS = ("date", "seed", "num_repetitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result with all that is known about how it came to be."""

    name: str
    engine: str | None
    """Name and version; None: not recorded."""
    settings: Mapping[str, object]
    """Effective settings by name."""
    hit_tokens: float | None
    """Tokens found in the prefix cache; None: not recorded."""
    summaries: tuple[Mapping[str, Scalar], ...]
    """Numbers of each repetition."""
    workload: str | None = None
    """What was asked of the engine, in a few numbers; None: not recorded."""
    steps: StepShapes | None = None
    notes: tuple[str, ...] = ()


def load_result(path: Path) -> Result:
    """Open a run directory, a step log (`*.gz`) or a result file.

    Raises:
        RunDirectoryError: a run directory or result file cannot be read; the message names it.
        TraceError: a step log is wrong.
    """
    if path.is_dir():
        return _from_run(path, read_run(path))
    if path.suffix == ".gz":
        return _from_log(read_vllm_log(path))
    return _from_file(path)


def _from_run(path: Path, run: RunResult) -> Result:
    summary = run.summary_dict
    decisions, timing = summary.get("decisions"), summary.get("timing")
    version = run.env.get("simserve")
    status = summary.get("status")
    return Result(
        name=path.name,
        engine=f"simserve {version}" if version and decisions and timing else None,
        settings=_flattened(_parse_config(path, run.config)),
        hit_tokens=_hit_tokens(summary),
        summaries=run.repetitions or (summary,),
        workload=_workload_of_table(run.requests_table),
        steps=StepShapes.of_table(run.steps_table),
        notes=() if status == "completed" else (f"{path.name}: the run's status is {status}",),
    )


def _parse_config(path: Path, text: str) -> Mapping[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RunDirectoryError(f"{path / 'config.yaml'}: is not YAML: {error}") from error
    return config if isinstance(config, dict) else {}


def _from_log(log: StepLog) -> Result:
    measured, config = measured_log(log), log.config
    numbers: dict[str, Scalar] = {
        f"{statistic}_{metric}_ms": None if value is None else 1000.0 * value
        for metric in METRICS
        for statistic in STATISTICS
        for value in [measured.get(metric, statistic)]
    }
    numbers["output_throughput"] = measured.output_throughput
    numbers["num_preemptions"] = measured.num_preemptions
    numbers["num_steps"] = measured.num_steps
    return Result(
        name=log.name,
        engine=log.engine or None,
        settings={
            "model": log.model.partition(" ")[0] or None,
            "gpu": log.gpu.removeprefix("NVIDIA ").lower() or None,
            **{
                name: value
                for name in config.__dataclass_fields__
                if (value := getattr(config, name)) is not None and name != "not_read"
            },
        },
        hit_tokens=measured.prefix_hit_tokens,
        summaries=(numbers,),
        workload=_workload(
            [request.prompt_len for request in log.requests],
            [request.output_len for request in log.requests],
            [request.arrival_s for request in log.requests],
        ),
        steps=StepShapes.of_log(log),
    )


def _workload_of_table(table: pa.Table) -> str:
    columns = ("input_length", "requested_output_length", "arrival_time_s")
    return _workload(*(table[name].to_pylist() for name in columns))


def _workload(
    prompt_lens: Sequence[int], output_lens: Sequence[int], arrivals_s: Sequence[float]
) -> str:
    span_s = max(arrivals_s, default=0.0) - min(arrivals_s, default=0.0)
    return (
        f"{len(prompt_lens)} requests of {sum(prompt_lens)} prompt and {sum(output_lens)} output "
        f"tokens within {span_s:.3f} s"
    )


def _from_file(path: Path) -> Result:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, parse_float=_float, parse_int=_int, parse_constant=_float)
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {why_unreadable(error)}") from error
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path}: is not JSON: {error}") from error
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    if not isinstance(content, dict):
        raise RunDirectoryError(f"{path}: expected one JSON object of results")
    config, engine = content.get("config", {}), content.get("engine")
    if not isinstance(config, dict):
        raise RunDirectoryError(f"{path}: config: expected an object of settings")
    if engine and not isinstance(engine, str):
        raise RunDirectoryError(f"{path}: engine: expected text, such as vllm-0.11.0")
    return Result(
        name=str(content.get("label") or path.stem),
        engine=engine or None,
        settings=_flattened(config),
        hit_tokens=_hit_tokens(content),
        summaries=(
            {
                key: value
                for key, value in content.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
                if key not in _NO_NUMBERS
            },
        ),
    )


def _float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _int(text: str) -> int:
    _float(text)
    return int(text)


def _hit_tokens(summary: Mapping[str, Any]) -> float | None:
    values = (summary.get(key) for key in HIT_TOKENS)
    counts = (v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    return next((float(count) for count in counts if count >= 0), None)


def _flattened(config: Mapping[str, Any]) -> dict[str, object]:
    """Settings by dotted path; those of the engine by their bare names."""
    flat: dict[str, object] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, Mapping) and (value or not prefix):
            for key, below in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), below)
            return
        part, _, name = prefix.partition(".")
        if part not in _NO_SETTINGS:
            flat[name if part in _FLAT and name != "kind" else prefix] = value

    walk("", config)
    return flat
