"""A run on the real executor beside the same run simulated: what `--real-gpu` ends with.

DIR/                    the real run
DIR/simulated/          the same configuration on a cost model
DIR/validation.json     both, number by number
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simserve.api import Progress, Written, run
from simserve.config.executor import ProfileCost, Real, Simulated
from simserve.config.loader import LoadedConfig
from simserve.cost.profile_file import load_profile
from simserve.cost.sampling_file import sampling_gpus
from simserve.errors import RunDirectoryError
from simserve.fidelity.logs.executor_facts import other_path
from simserve.fidelity.validate.percentile_table import Compared, percentile_rows
from simserve.metrics.arrow import column
from simserve.metrics.options import Scalar
from simserve.metrics.rundir import read_run

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

__all__ = ["Validation", "compile_warning", "simulated_twin", "validate"]

SIMULATED = "simulated"
VALIDATION = "validation.json"
_FIRST_SHAPE = "parts.first_shape"
_SHADOW = "parts.shadow_s"
_DRAFTS = "parts.draft_s"
_GIB = 1024**3
_PATH = ("attention", "kv_layout", "mixed", "dtype", "kv_dtype")


class Validation(NamedTuple):
    """How far the simulation of a real run is off."""

    statement: str
    """What ran and what was simulated, in one line."""
    rows: list[Compared]


def validate(
    loaded: LoadedConfig, real: Written, *, progress: Progress | None = None
) -> Validation:
    """Simulate what has run for real, and write both results side by side.

    Args:
        loaded: the configuration that ran, `executor.kind: real`.
        real: its run directory, which is complete and gains two entries.
        progress: called after each step of the simulation.

    Raises:
        RunDirectoryError: the directory cannot be read or written.
        SimserveError: as `run` has it.
    """
    directory = real.directory
    of_twin = simulated_twin(loaded, real.summary)
    twin = run(of_twin, progress=progress)
    twin.save(directory / SIMULATED)
    steps = read_run(directory).steps_table
    statement = _statement(real.summary, twin.summary_dict, int(_compiled(steps).sum()))
    if flag := _other_path(of_twin, real.summary):
        statement += f"; {flag}"
    rows = [*percentile_rows(real.summary, twin.summary_dict), *_priced(steps), *_memory(real)]
    content = {"statement": statement, "rows": [row.as_json() for row in rows]}
    try:
        (directory / VALIDATION).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        )
    except OSError as error:
        raise RunDirectoryError(f"{directory}: cannot be written: {error}") from error
    return Validation(statement, rows)


def simulated_twin(loaded: LoadedConfig, real: Mapping[str, Scalar]) -> LoadedConfig:
    """The configuration with a cost model in the place of the device.

    The cost model is that of `executor.cost`. The pool has as many blocks as the real one, which
    may have taken them from free memory. Where the model verified drafts, they are made up with the
    acceptance that was measured; else `executor.sampling` is priced, if the GPU's times are known.
    """
    config, executor = loaded.config, loaded.config.executor
    assert isinstance(executor, Real)
    kv_cache = config.kv_cache.model_copy(update={"num_gpu_blocks": real["num_gpu_blocks"]})
    speculative = config.scheduler.speculative
    is_priced = speculative is None and loaded.gpu.name in sampling_gpus()
    simulated = Simulated(cost=executor.cost, sampling=executor.sampling if is_priced else [])
    update: dict[str, Any] = {"executor": simulated, "kv_cache": kv_cache}
    if speculative is not None and executor.tokens == "sampled":
        name = "spec_decode_conditional_acceptance_pos"
        k = speculative.num_speculative_tokens
        measured = tuple(float(real.get(f"{name}_{i}") or 0.0) for i in range(k))
        made_up = speculative.model_copy(update={"acceptance": measured})
        update["scheduler"] = config.scheduler.model_copy(update={"speculative": made_up})
    return replace(loaded, config=config.model_copy(update=update))


def _statement(
    real: Mapping[str, Scalar], simulated: Mapping[str, Scalar], num_first_shapes: int
) -> str:
    name = real.get("executor.device_name") or real["executor.device"]
    path = ", ".join(f"{key} {real[f'executor.{key}']}" for key in _PATH)
    compiled = f", something was compiled in {num_first_shapes} steps" if num_first_shapes else ""
    return (
        f"decisions {real['decisions']}; real: {name}, {path}{compiled}; "
        f"simulated: timing {simulated['timing']}"
    )


def _other_path(simulated: LoadedConfig, real: Mapping[str, Scalar]) -> str | None:
    """That the profile is of another path than that which ran; None if it is not."""
    executor = simulated.config.executor
    cost = executor.cost if isinstance(executor, Simulated) else None
    if not isinstance(cost, ProfileCost):
        return None
    facts = {name: real[f"executor.{name}"] for name in ("device", *_PATH)}
    return other_path(load_profile(cost.name, cost.path, simulated.base_dir), facts)


def compile_warning(directory: Path) -> str | None:
    """What is to be said of a real run in whose steps something was compiled; None of another.

    Raises:
        RunDirectoryError: the directory cannot be read.
    """
    steps = read_run(directory).steps_table
    compiled = _compiled(steps)
    if not compiled.any():
        return None
    durations = column(steps, "duration_s")
    return (
        f"{compiled.sum():,} of {len(compiled):,} steps compiled kernels or captured CUDA graphs: "
        f"{durations[compiled].sum():.2f} s of the {durations.sum():.2f} s that all steps took. "
        "Requests waited for that, so the latencies are not those of a warm engine"
    )


def _compiled(steps: pa.Table) -> NDArray[np.bool_]:
    """Steps that were the first of their shape, although all should have been warmed up."""
    if _FIRST_SHAPE not in steps.column_names:
        return np.zeros(steps.num_rows, dtype=bool)
    return np.asarray(column(steps, _FIRST_SHAPE) > 0)


def _priced(steps: pa.Table) -> Iterator[Compared]:
    """What the shadow says of the very steps that ran: no decision differs here.

    It prices the model's steps, and knows neither of the making of drafts, whose time is left out,
    nor of compilers, so that steps in which one ran are left out.
    """
    if _SHADOW in steps.column_names:
        kept = ~_compiled(steps)
        measured, priced = (
            float(column(steps, name)[kept].sum()) for name in ("duration_s", _SHADOW)
        )
        which = "all real steps" if kept.all() else "real steps that compiled nothing"
        if _DRAFTS in steps.column_names:
            measured -= float(column(steps, _DRAFTS)[kept].sum())
            which += ", without drafting"
        yield Compared("shadow_s", f"{which}, priced by the shadow (s)", measured, priced)


def _memory(real: Written) -> Iterator[Compared]:
    """The most that was taken on the GPU, beside what `simserve capacity` expects."""
    used = real.summary.get("executor.gpu_used_bytes")
    expected = real.summary.get("executor.estimated_gpu_memory_bytes")
    if isinstance(used, int) and isinstance(expected, int):
        yield Compared("gpu_memory_gib", "GPU memory (GiB)", used / _GIB, expected / _GIB)
