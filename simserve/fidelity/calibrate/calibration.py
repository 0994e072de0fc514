"""What a calibration has measured, as a file, and the profile that is fitted to it."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.config.presets import load_gpu
from simserve.cost.dealing import AttentionPlan
from simserve.cost.profile_file import Engine, Graphs, ProfileFile
from simserve.cost.step_model import Sheet, sheet
from simserve.errors import SimserveError, why_unreadable
from simserve.fidelity.fit.host import engine_seconds
from simserve.fidelity.fit.own_host import own_host
from simserve.fidelity.fit.profile import fit_profile
from simserve.fidelity.fit.step import predict, slowed
from simserve.fidelity.logs.executor_facts import ENGINE
from simserve.fidelity.logs.loaded_log import LoadedLog
from simserve.fidelity.logs.step_watch import MeasuredSteps
from simserve.types import ModelShape

__all__ = [
    "GROUPS",
    "Calibration",
    "fit_calibration",
    "predicted_s",
    "read_calibration",
    "write_calibration",
]

Floats = NDArray[np.float64]

_VERSION = 1
_WARM_HOSTS = np.append(1.0, np.geomspace(0.2, 2.0, 47))
"""Speeds of a host that designed steps may have had; 1 is that of the traffic."""
GROUPS = ("designed", "traffic", "held_out")
"""Steps that a calibration consists of."""
_FACTS = (
    "kv_dtype",
    "gpu",
    "timing_version",
    "decision_version",
    "attention_path",
    "measured_on",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured steps of the real executor, and on what."""

    model: ModelShape
    kv_dtype: str
    gpu: str
    """Name of a preset."""
    timing_version: str
    """Of simserve."""
    decision_version: str
    """Of the engine whose rules formed the traffic's steps."""
    attention_path: str
    measured_on: str
    graphs: Graphs
    attention_plan: AttentionPlan | None
    """None: how attention was dealt out to the GPU is not known."""
    designed: MeasuredSteps
    """Steps that no scheduler made: schedule() and update() are 0."""
    traffic: MeasuredSteps
    held_out: MeasuredSteps

    def group(self, name: str) -> MeasuredSteps:
        """`designed`, `traffic` or `held_out`."""
        found: MeasuredSteps = getattr(self, name)
        return found

    @property
    def sheet(self) -> Sheet:
        """Data-sheet times of the model."""
        return sheet(self.model, load_gpu(self.gpu), self.kv_dtype)


@dataclass(frozen=True, slots=True)
class _Log(LoadedLog):
    """A group of steps as what a fit takes; its model need not be a preset."""

    measured: Calibration

    @property
    def sheet(self) -> Sheet:
        """Data-sheet times of the model."""
        return self.measured.sheet


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration as gzipped JSON, from which it can be fitted again.

    Raises:
        SimserveError: the file cannot be written.
    """
    plan = calibration.attention_plan
    document = {
        "schema_version": _VERSION,
        **{name: getattr(calibration, name) for name in _FACTS},
        "model": asdict(calibration.model),
        "graphs": calibration.graphs.model_dump(),
        "attention_plan": plan and plan.model_dump(),
        **{name: calibration.group(name).as_json() for name in GROUPS},
    }
    try:
        path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    except OSError as error:
        raise SimserveError(f"{path}: cannot be written: {error}") from error


def read_calibration(path: Path) -> Calibration:
    """Read what `write_calibration` wrote.

    Raises:
        SimserveError: the file cannot be read, or is another one.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SimserveError(f"{path}: cannot be read: {why_unreadable(error)}") from error
    try:
        document = json.loads(gzip.decompress(content))
        if document.pop("schema_version") != _VERSION:
            raise ValueError("another schema_version")
        plan = document.get("attention_plan")
        read: dict[str, Any] = {name: _read_group(name, document[name], plan) for name in GROUPS}
        read |= {name: str(document[name]) for name in _FACTS}
        return Calibration(
            **read,
            model=ModelShape(**document["model"]),
            graphs=Graphs(**document["graphs"]),
            attention_plan=AttentionPlan(**plan) if plan else None,
        )
    except (gzip.BadGzipFile, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SimserveError(f"{path}: cannot read these measured steps: {error!r}") from error


def _read_group(name: str, columns: Mapping[str, list[float]], plan: object) -> MeasuredSteps:
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError(f"{name}: columns of unlike lengths")
    measured = MeasuredSteps.of(columns)
    if (measured.steps.dealt is None) == bool(plan):
        raise ValueError(f"{name}: attention_plan and columns of attention do not go together")
    return measured


def fit_calibration(calibration: Calibration, name: str) -> ProfileFile:
    """Fit a profile to the designed steps and the traffic; errors are those of the held out part.

    The host's times are those of the traffic, the kernels' are fitted to what the device's clock
    says of all steps, so that neither takes what is the other's. Designed steps repeat what the
    host has just done and find its caches warm: where kernels wait for launches, theirs counts as
    a faster host, and how much faster is fitted.
    """
    host = own_host(calibration.traffic)
    logs = [
        _log(calibration, name, steps)
        for name, steps in (
            ("designed", _with_scheduler(calibration.designed, host)),
            ("traffic", calibration.traffic),
            ("held_out", calibration.held_out),
        )
    ]
    profile = fit_profile(
        logs[:2],
        logs[2:],
        name=name,
        model=calibration.model.name,
        attention_path=calibration.attention_path,
        measured_on=calibration.measured_on,
        graphs=calibration.graphs,
        attention_plan=calibration.attention_plan,
        known=host,
        own_hosts=("designed",),
    )
    engine = Engine(
        name=ENGINE,
        timing_version=calibration.timing_version,
        decision_version=calibration.decision_version,
    )
    return profile.model_copy(update={"engine": engine})


def predicted_s(
    calibration: Calibration, profile: ProfileFile, group: str
) -> tuple[MeasuredSteps, Floats]:
    """The steps of a group, the scheduler's share included, and what the profile says of them.

    Designed steps are priced on the host of one speed that is nearest to them.
    """
    steps = calibration.group(group)
    clock = (profile.clock.prefills, profile.clock.decodes) if profile.clock else None
    slower = slowed(clock, steps.share_of_flops(calibration.sheet), steps.steps)

    def prices(host_scale: float) -> Floats:
        return predict(
            profile.coefficients,
            calibration.sheet,
            steps.steps,
            profile.graphs,
            host_scale,
            profile.factors,
            slower,
        )

    if group != "designed":
        return steps, prices(1.0)
    steps = _with_scheduler(steps, profile.coefficients)
    measured_s, engine_s = steps.steps.duration_s, steps.steps.engine_s
    ways = [prices(scale) + (1.0 - scale) * engine_s for scale in _WARM_HOSTS.tolist()]
    return steps, min(ways, key=lambda way: float(np.abs(np.log(way / measured_s)).mean()))


def _with_scheduler(measured: MeasuredSteps, coefficients: Mapping[str, float]) -> MeasuredSteps:
    """Designed steps as if a scheduler had made them, at the price of its time in the traffic."""
    steps = measured.steps
    schedule_s, update_s = (
        engine_seconds({k: v for k, v in coefficients.items() if k.startswith(kind)}, steps)
        for kind in ("schedule_", "update_")
    )
    duration_s = steps.duration_s + schedule_s + update_s
    priced = replace(steps, schedule_s=schedule_s, update_s=update_s, duration_s=duration_s)
    return MeasuredSteps(priced, measured.host_s, measured.heat)


def _log(calibration: Calibration, name: str, measured: MeasuredSteps) -> _Log:
    content: dict[str, Any] = measured.as_json()
    return _Log(
        name=name,
        sha256=hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        engine=f"{ENGINE}-{calibration.timing_version}",
        model=calibration.model.name,
        gpu=calibration.gpu,
        steps=measured.steps,
        kernels_s=measured.forward_s,
        heat=measured.share_of_flops(calibration.sheet),
        measured=calibration,
    )
