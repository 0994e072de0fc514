"""`simserve report`: one page to look at instead of files to read, or a report for the record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN|SWEEP", help="A run directory, or that of a sweep.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="F",
            help="Where to write it. Default: report.html in the directory; with --formal, stdout.",
            show_default=False,
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the figures as PNG files there as well."),
    ] = None,
    formal: Annotated[
        bool,
        typer.Option(
            "--formal",
            help="Print, as Markdown, all that the numbers of a run mean nothing without, and name "
            "what is missing.",
        ),
    ] = False,
) -> None:
    """Make one HTML page that needs no network: charts, tables that sort, every setting.

    Of a real run with its simulation (RUN/simulated) the page begins with both against each other.

    Exit status: 0 done, 1 the formal report lacks something, 2 there is no such directory, or a
    file cannot be written.
    """
    from simserve.report.artefact import write_bytes, write_text

    if formal:
        if figures is not None:
            raise typer.BadParameter("does not go with --formal", param_hint="--figures")
        _formal(directory, out)
        return
    from simserve.report.contents import figures_of, page_of

    path = out or directory / "report.html"
    write_text(path, page_of(directory))
    typer.echo(f"page: {path}")
    if figures is not None:
        for name, picture in figures_of(directory).items():
            write_bytes(figures / name, picture)
            typer.echo(f"figure: {figures / name}")


def _formal(directory: Path, out: Path | None) -> None:
    from simserve.report.artefact import write_text
    from simserve.report.formal import formal_report

    made = formal_report(directory)
    if out is None:
        typer.echo(made.markdown, nl=False)
    else:
        write_text(out, made.markdown)
        typer.echo(f"report: {out}")
    if made.missing:
        typer.echo(f"missing: {'; '.join(made.missing)}", err=True)
        raise typer.Exit(1)
