"""`simserve trace list` and `fetch`: public traces by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from simserve.workload.public import PublicTrace

__all__ = ["fetch", "list_traces"]


def list_traces() -> None:
    """Show the public traces: what each is, its licence, whether it is here, and its URL."""
    from rich.console import Console
    from rich.table import Table

    from simserve.workload.public import cache_folder, copies_of, public_names, public_trace

    table = Table("name", "what it is", "licence", "here")
    traces = [public_trace(name) for name in public_names()]
    for trace in traces:
        here = ""
        if copies := copies_of(trace):
            here = "yes" if trace.is_at(copies[0]) else "another file"
        table.add_row(trace.name, trace.description, trace.licence, here)
    Console().print(table)
    print(f"fetched into {cache_folder()}")
    for trace in traces:
        print(f"{trace.file_name}: {trace.url}")


def fetch(
    name: Annotated[str, typer.Argument(help="One of those that `simserve trace list` shows.")],
) -> None:
    """Download a public trace into the cache folder, check its hash, and say whom to cite.

    A download that broke off goes on where it stopped. Afterwards a configuration may name it:
    workload: {trace: {name: NAME}}.
    """
    from simserve.workload.public import public_trace

    trace = public_trace(name)
    _download(trace)
    print(f"licence: {trace.licence}; cite {trace.attribution}")
    print(f"source: {trace.source}")
    print(f"in a configuration: workload: {{trace: {{name: {name}}}}}")


def _download(trace: PublicTrace) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from simserve.workload.fetch import fetch_trace
    from simserve.workload.public import cache_folder

    folder = cache_folder()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(trace.name, total=None)
        path = fetch_trace(
            trace,
            folder,
            progress=lambda had, total: bar.update(task, completed=had, total=total),
        )
    at = folder / trace.file_name
    print(f"{at}: was there already" if path is None else f"{at}: fetched, SHA-256 as published")
