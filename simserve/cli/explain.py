"""`simserve explain`: where one request's time went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["explain"]


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="A request's id, as requests.parquet has it.")
    ],
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

    told = tell(read_run(run), request, str(run))
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
