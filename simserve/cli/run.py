"""`simserve run`: one configuration, one run directory; a real run is also simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simserve.cli.options import (
    ConfigArgument,
    GoodputOption,
    MetricPercentilesOption,
    OverrideOption,
    PercentileMetricsOption,
    QuietOption,
    SeedOption,
    metric_overrides,
)
from simserve.errors import RunDirectoryError

if TYPE_CHECKING:
    from simserve.api import Written
    from simserve.config.loader import LoadedConfig

__all__ = ["free_directory", "run"]

OutOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Run directory, new or empty. Default: runs/<name of CONFIG>, with -2, -3, … "
        "if that exists.",
    ),
]
RealGpuOption = Annotated[
    bool,
    typer.Option(
        "--real-gpu",
        help="Run the model on this GPU: -o executor.kind=real -o executor.device=cuda.",
    ),
]
NoSimOption = Annotated[
    bool,
    typer.Option("--no-sim", help="After a real run, do not simulate the same to compare with it."),
]


def run(
    config: ConfigArgument,
    override: OverrideOption = None,
    out: OutOption = None,
    seed: SeedOption = None,
    percentile_metrics: PercentileMetricsOption = None,
    metric_percentiles: MetricPercentilesOption = None,
    goodput: GoodputOption = None,
    real_gpu: RealGpuOption = False,
    no_sim: NoSimOption = False,
    quiet: QuietOption = False,
) -> None:
    """Simulate a configuration, or run it on a GPU, and write a run directory.

    TTFT is the time to the first token, E2EL the whole request. ITL is every gap between
    consecutive tokens, pooled over requests; TPOT is (E2EL - TTFT) / (tokens - 1), one value per
    request. What NVIDIA (AIPerf) and GuideLLM print as "inter-token latency" is TPOT here.

    Exit status: 0 done, 1 all requests were rejected, 2 wrong configuration or trace, 3 stalled or
    out of a profile's domain, 130 interrupted. With 1 and 130 the run directory is complete, too.

    A real run (executor.kind: real) is simulated as well, in DIR/simulated, and ends with a table
    of both.
    """
    from simserve.cli.progress import Progress
    from simserve.cli.table import print_run
    from simserve.config.loader import load_config

    flags = metric_overrides(seed, percentile_metrics, metric_percentiles, goodput)
    loaded = load_config(config, [*_real(real_gpu), *(override or []), *flags])
    is_real = loaded.config.executor.kind == "real"
    if no_sim and not is_real:
        raise typer.BadParameter(
            "goes with --real-gpu or executor.kind: real", param_hint="--no-sim"
        )
    for warning in () if quiet else loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)
    directory = free_directory(config, out)
    from simserve import api  # loads the simulator: a wrong configuration is reported sooner

    with Progress(enabled=not quiet, is_real=is_real) as progress:
        written = api.run_to_directory(loaded, out=directory, progress=progress.update)
    if not quiet:
        asked = loaded.config.metrics
        print_run(
            written.summary,
            directory=written.directory,
            picture=written.picture,
            metrics=asked.percentile_metrics if percentile_metrics else None,
            percentiles=asked.percentiles if metric_percentiles else None,
        )
        for warning in written.warnings:
            if warning not in loaded.warnings:
                typer.echo(f"warning: {warning}", err=True)
    if is_real and not quiet:
        _warn_of_compilers(written)
    _leave_if_interrupted(written)
    _leave_if_all_rejected(written)
    if is_real and not no_sim:
        _compare(loaded, written, quiet)


def _real(real_gpu: bool) -> list[str]:
    return ["executor.kind=real", "executor.device=cuda"] if real_gpu else []


def _leave_if_interrupted(written: Written) -> None:
    if written.summary.get("status") == "interrupted":
        typer.echo(f"interrupted: {written.directory} has what ran until then", err=True)
        raise typer.Exit(130)


def _leave_if_all_rejected(written: Written) -> None:
    """Nothing was measured, which whoever looks at numbers later would notice late."""
    from simserve.metrics.table_file import REQUESTS

    rejected = written.summary.get("rejected")
    if rejected and rejected == written.summary.get("num_prompts"):
        why = f"{written.directory / REQUESTS} says why"
        typer.echo(f"no request ran: all {rejected} were rejected; {why}", err=True)
        raise typer.Exit(1)


def _warn_of_compilers(written: Written) -> None:
    """Say so on stderr if steps took long only because something was compiled in them."""
    from simserve.fidelity.validate.real_gpu import compile_warning

    warning = compile_warning(written.directory)
    if warning is not None:
        typer.echo(f"warning: {warning}", err=True)


def _compare(loaded: LoadedConfig, written: Written, quiet: bool) -> None:
    """Simulate what ran, and print how far off that is."""
    from simserve.cli.measurement import print_table
    from simserve.cli.progress import Progress
    from simserve.fidelity.validate.percentile_table import percentile_cells
    from simserve.fidelity.validate.real_gpu import validate

    with Progress(enabled=not quiet) as progress:
        validation = validate(loaded, written, progress=progress.update)
    if not quiet:
        typer.echo(f"\n{validation.statement}\n")
        print_table(percentile_cells(validation.rows))


def free_directory(config: str, out: str | None) -> Path:
    """Where a run may be written without overwriting anything.

    Raises:
        RunDirectoryError: `out` is there and not an empty folder.
    """
    if out is not None:
        path = Path(out)
        try:
            is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        except OSError as error:
            raise RunDirectoryError(f"{out:.200}: cannot write there: {error}") from error
        if not is_free:
            raise RunDirectoryError(f"{out}: exists already; name a new or empty folder for --out")
        return path.resolve() if path.is_symlink() and path.is_dir() else path
    first = Path("runs") / Path(config).stem
    path, number = first, 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path
