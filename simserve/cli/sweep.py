"""`simserve sweep`: many runs of one configuration, and one table of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from simserve.cli.options import OverrideOption, QuietOption
from simserve.errors import RunDirectoryError

if TYPE_CHECKING:
    from simserve.cli.sweep_progress import SweepProgress
    from simserve.config.sweep import Sweep
    from simserve.config.sweep_loader import Point
    from simserve.sweep.runner import SweepResult

__all__ = ["sweep"]

SweepArgument = Annotated[
    str, typer.Argument(metavar="SWEEP.yaml", help="A configuration with a `sweep` section.")
]
OutOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Sweep directory, new or empty. Default: runs/<name of SWEEP>, with -2, -3, … if "
        "that exists; with --resume the last of these.",
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Points at a time. Default: as many as CPUs; on a real GPU one after another."
    ),
]
BackendOption = Annotated[
    Literal["process", "ray"],
    typer.Option(help="Where points run: processes of this machine, or a Ray cluster."),
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Of a running cluster: auto, HOST:PORT or ray://HOST:PORT. Default: a Ray of its "
        "own on this machine.",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Run only points that are not done yet; failed ones again."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="List the points; run and write nothing.")
]
RealGpuOption = Annotated[
    bool,
    typer.Option(
        "--real-gpu",
        help="Run each point on this GPU, one after another: -o executor.kind=real "
        "-o executor.device=cuda.",
    ),
]
_MAX_ROWS = 40
_MAX_WARNINGS = 3
_MAX_SETTINGS = 4
"""Columns of them that leave room for numbers on 80 characters."""
_NAME_WIDTH = 30
"""Characters of a point's name that leave such room."""


def sweep(
    config: SweepArgument,
    override: OverrideOption = None,
    out: OutOption = None,
    jobs: JobsOption = None,
    backend: BackendOption = "process",
    ray_address: RayAddressOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    real_gpu: RealGpuOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a configuration with other values of some keys, and write a sweep directory.

    The `sweep` section says which keys vary and how their values combine: docs/sweeps.md. Each
    point is a run directory, made in a process of its own. All points have the same seeds, and so
    the same workload unless that is what varies.

    Exit status: 0 all points done, 1 some failed (NAME.failure.json says why), 2 wrong
    configuration, 130 ended by Ctrl-C or SIGTERM (--resume goes on from there).
    """
    from simserve.cli.interrupt import interrupted_once
    from simserve.cli.sweep_progress import SweepProgress
    from simserve.config.sweep_loader import load_points, load_sweep

    if ray_address is not None and backend != "ray":
        raise typer.BadParameter("goes with --backend ray", param_hint="--ray-address")
    real = ["executor.kind=real", "executor.device=cuda"] if real_gpu else []
    loaded = load_sweep(config, [*real, *(override or [])])
    points = load_points(loaded)
    if dry_run:
        _print_points(points)
        return
    directory = _directory(config, out, resume)
    from simserve.sweep.runner import run_sweep

    progress = SweepProgress(len(points), enabled=not quiet)
    with interrupted_once(), _advising(progress, len(points), directory), progress:
        result = run_sweep(
            loaded,
            out=directory,
            jobs=jobs,
            backend=backend,
            ray_address=ray_address,
            resume=resume,
            listener=progress,
        )
    if not quiet:
        _print_result(result, loaded.sweep)
        _warn(result)
    if result.num_failed:
        typer.echo(f"{result.num_failed} of {len(points)} points failed", err=True)
        raise typer.Exit(1)


@contextmanager
def _advising(progress: SweepProgress, num_points: int, directory: Path) -> Iterator[None]:
    """Say how an interrupted sweep goes on; after the progress, which would wipe it away."""
    try:
        yield
    except KeyboardInterrupt:
        done = f"interrupted: {progress.num_done} of {num_points} points are done"
        rest = "writes the summary" if progress.num_done == num_points else "runs the others"
        typer.echo(f"{done}; --resume --out {directory} {rest}", err=True)
        raise typer.Exit(130) from None


def _directory(config: str, out: str | None, resume: bool) -> Path:
    from simserve.cli.run import free_directory

    if not resume:
        try:
            return free_directory(config, out)
        except RunDirectoryError as error:
            if out is None or not Path(out).is_dir():
                raise
            raise RunDirectoryError(f"{error}, or --resume the sweep in it") from error
    if out is not None:
        return Path(out)
    last = first = Path("runs") / Path(config).stem
    number = 2
    while (later := first.with_name(f"{first.name}-{number}")).exists():
        last, number = later, number + 1
    return last


def _print_points(points: list[Point]) -> None:
    for point in points:
        typer.echo(point.name if point.error is None else f"{point.name}: fails: {point.error}")
    num_failing = sum(point.error is not None for point in points)
    failing = f", {num_failing} of which cannot run" if num_failing else ""
    typer.echo(f"{len(points)} points{failing}")


def _print_result(result: SweepResult, sweep: Sweep) -> None:
    """A row a point: what tells it from others, then latencies."""
    from rich.console import Console
    from rich.table import Table

    from simserve.cli.sweep_progress import SHOWN, heading, shown_cells
    from simserve.config.sweep_cells import short_names

    console = Console()
    table = Table()
    swept = [*(["scenario"] if sweep.type == "scenarios" else []), *sweep.parameters]
    if sweep.type == "one_at_a_time" or len(swept) > _MAX_SETTINGS:
        swept = ["point"]
    for key, name in short_names(swept).items():
        is_number = all(isinstance(row[key], int | float) for row in result.rows)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(heading(name), justify=justify, overflow="fold")
    for name in SHOWN.values():
        table.add_column(name.replace(" (", "\n("), justify="right", overflow="fold")
    for row in result.rows[:_MAX_ROWS]:
        cells = ["failed"] if row["status"] == "failed" else shown_cells(row)
        table.add_row(*(_setting(row, key) for key in swept), *cells)
    console.print(table)
    if len(result.rows) > _MAX_ROWS:
        console.print(f"and {len(result.rows) - _MAX_ROWS} more", highlight=False)
    path = result.directory / "summary.csv"
    console.print(f"summary: {path}", highlight=False, soft_wrap=True)


def _setting(row: Mapping[str, Any], key: str) -> str:
    from simserve.cli.sweep_progress import heading

    text = "–" if row[key] is None else str(row[key])
    return heading(text, _NAME_WIDTH) if key == "point" else text


def _warn(result: SweepResult) -> None:
    """What came up in points, and in how many."""
    from simserve.report.outcomes import points_warnings

    said = points_warnings([row for row in result.rows if row["status"] != "failed"])
    for text in said[:_MAX_WARNINGS]:
        typer.echo(f"warning: {text}", err=True)
    if len(said) > _MAX_WARNINGS:
        typer.echo(f"and {len(said) - _MAX_WARNINGS} more: see the column `warnings`", err=True)
