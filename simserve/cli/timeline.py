"""`simserve timeline`: a run for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["timeline"]


def timeline(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="F",
            help="Where to write the trace. Default: RUN/timeline.json.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write steps, requests, KV use and preemptions as a trace for ui.perfetto.dev.

    chrome://tracing opens it too. If RUN holds a real run and its simulation (RUN/simulated), both
    stand one below the other on one clock.

    Exit status: 0 done, 2 there is no such run, or the file cannot be written.
    """
    from simserve.cli.progress import tracking
    from simserve.report.artefact import load_runs, write_text
    from simserve.report.timeline import write_timeline

    path = out or run / "timeline.json"
    with tracking() as track:
        write_text(path, write_timeline(load_runs(run), track))
    typer.echo(f"timeline: {path} (open it in https://ui.perfetto.dev)")
