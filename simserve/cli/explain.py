"""`simserve explain`: where one request's time went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["explain"]

Metric = Literal["ttft", "e2el"]


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    request: Annotated[
        str | None,
        typer.Argument(metavar="REQUEST", help="A request's id, as requests.parquet has it."),
    ] = None,
    slowest: Annotated[
        Metric | None, typer.Option(help="The request with the largest TTFT or E2EL.")
    ] = None,
) -> None:
    """Say in a paragraph and a bar where one request's time went.

    A step counts for what the request did in it. A decode step that also computed prompts counts
    as decode for as long as this request's steps without prompts take (their median), and as
    stalled for the rest; that is shared out among the prompts by their tokens.

    Exit status: 0 done, 2 there is no such run or request.
    """
    from rich.console import Console
    from rich.table import Table

    from simserve.metrics.rundir import read_run
    from simserve.report.explanation import explain as tell
    from simserve.report.explanation import slowest as find_slowest

    if (request is None) == (slowest is None):
        raise typer.BadParameter("give either a request's id or --slowest", param_hint="REQUEST")
    result = read_run(run)
    if slowest is not None:
        request = find_slowest(result, slowest, str(run))
    told = tell(result, str(request), str(run))
    console = Console(highlight=False, markup=False)
    console.print(told.paragraph)
    if not told.rows:
        return
    console.print(f"\n{told.bar}\n", soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify)
    for glyph, name, milliseconds, share in told.rows:
        table.add_row(glyph, name, f"{milliseconds:,.1f} ms", f"{100 * share:.1f} %")
    console.print(table)
