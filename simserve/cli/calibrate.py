"""`simserve calibrate`: measure the steps of a model on this GPU and make a profile of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simserve.cli.measurement import check_writable, print_table
from simserve.cli.options import OverrideOption, naming_options
from simserve.errors import SimserveError

if TYPE_CHECKING:
    from simserve.cost.profile_file import ProfileFile
    from simserve.fidelity.calibrate.calibration import Calibration

__all__ = ["calibrate"]

_OPTIONS = {"model": "--model", "gpu": "--gpu", "executor.device": "--device"}
"""Which option sets a key."""
TimeLimitOption = Annotated[
    float,
    typer.Option(
        min=1.0,
        metavar="SECONDS",
        help="For all of it, loading included. All designed steps and the traffic are run once in "
        "any case.",
    ),
]


def calibrate(
    model: Annotated[
        str, typer.Option(help="Preset, or the path of a Hugging Face config.json.")
    ] = "llama-3.1-8b",
    out: Annotated[Path, typer.Option(metavar="profile.json", help="The profile to write.")] = Path(
        "profile.json"
    ),
    gpu: Annotated[
        str | None, typer.Option(help="GPU preset. Default: the one with this GPU's name.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu (plain torch).")] = "cuda",
    time_limit: TimeLimitOption = 110.0,
    traffic_steps: Annotated[
        int, typer.Option(min=20, help="Steps of each of ten streams of traffic.")
    ] = 100,
    override: OverrideOption = None,
    steps: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Fit what was measured before, of a file that this command wrote; needs no GPU.",
        ),
    ] = None,
) -> None:
    """Measure designed steps and some traffic on the real executor, and fit a profile to them.

    Beside profile.json are written profile.png, measured against predicted, and
    profile.steps.json.gz, all that was measured.

    Exit status: 0 done, 2 no torch or GPU, or a configuration that cannot run on it.
    """
    from simserve.cli.progress import waiting
    from simserve.fidelity.calibrate.calibration import (
        fit_calibration,
        read_calibration,
        write_calibration,
    )
    from simserve.fidelity.calibrate.measure import gpu_here, measure, require_device

    check_writable(out)
    stem = out.name.removesuffix(".json")
    if steps is not None:
        calibration = read_calibration(steps)
    else:
        require_device(_chosen_device(device, override or []))
        source = _source(model, gpu or gpu_here(), device)
        with naming_options("simserve calibrate", model, _OPTIONS):
            calibration = measure(
                source,
                override or [],
                time_limit_s=time_limit,
                traffic_steps=traffic_steps,
                tell=lambda text: typer.echo(text, err=True),
            )
        write_calibration(out.with_name(f"{stem}.steps.json.gz"), calibration)
    with waiting("fitting the profile"):
        profile = fit_calibration(calibration, stem)
    _write(out, calibration, profile)
    _print(calibration, profile)


def _chosen_device(device: str, overrides: Sequence[str]) -> str:
    """The device that the configuration will have."""
    pairs = [text.partition("=") for text in overrides]
    chosen = [value.strip() for key, _, value in pairs if key.strip() == "executor.device"]
    return [device, *chosen][-1]


def _source(model: str, gpu: str, device: str) -> dict[str, object]:
    """A configuration of the default engine, but for batches of no more than 256 requests."""
    is_path = model.endswith(".json") or "/" in model
    return {
        "model": {"config": model} if is_path else model,
        "gpu": gpu,
        "executor": {"kind": "real", "device": device},
        "scheduler": {"max_num_seqs": 256},
    }


def _write(out: Path, calibration: Calibration, profile: ProfileFile) -> None:
    picture = out.with_name(f"{profile.name}.png")
    try:
        out.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8", newline="\n")
        picture.write_bytes(_picture(calibration, profile))
    except OSError as error:
        raise SimserveError(f"--out {out}: cannot be written: {error}") from error


def _picture(calibration: Calibration, profile: ProfileFile) -> bytes:
    from simserve.fidelity.calibrate.points import regimes
    from simserve.report.calibration_plot import draw_calibration

    title = f"{profile.name}: {profile.model} on {profile.measured_on}"
    return draw_calibration(regimes(calibration, profile), title)


def _print(calibration: Calibration, profile: ProfileFile) -> None:
    from simserve.fidelity.fit.report import error_cells

    num_fitted = len(calibration.designed) + len(calibration.traffic)
    typer.echo(f"fitted on {num_fitted:,} steps; errors on {len(calibration.held_out):,} others:")
    print_table(error_cells({"blind": profile.errors["blind"]}))
