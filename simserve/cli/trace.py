"""`simserve trace`: look at traces, check, convert, generate and fetch them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simserve.cli.trace_generate import app as generate_app
from simserve.cli.trace_generate import named_faults
from simserve.cli.trace_public import fetch, list_traces
from simserve.errors import SimserveError, TraceError, counted

if TYPE_CHECKING:
    from rich.table import Table

    from simserve.workload.stats import LengthStats, TraceStats
    from simserve.workload.trace import Trace

__all__ = ["app"]

app = typer.Typer(
    help="Inspect, validate, convert, generate and fetch traces.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(generate_app, name="generate")
app.command()(fetch)
app.command("list")(list_traces)

File = Annotated[Path, typer.Argument(help="Trace file.")]
Format = Annotated[str, typer.Option(help="Name of its format; auto looks at the file.")]
BadRows = Annotated[
    str,
    typer.Option("--on-bad-row", help="error: stop at a bad row; drop: leave it out and count."),
]
ReaderOptions = Annotated[
    list[str] | None,
    typer.Option("-o", metavar="KEY=VALUE", help="Option of the format, e.g. block_size=512."),
]


@app.command()
def inspect(
    file: File,
    format: Format = "auto",
    on_bad_row: BadRows = "error",
    option: ReaderOptions = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="KV block for the prefix-hit bound (tokens).")
    ] = 16,
    plot: Annotated[Path | None, typer.Option(help="Draw the trace into this PNG file.")] = None,
) -> None:
    """Show rate, burstiness, lengths and how much of the prompts a prefix cache could serve."""
    from rich.console import Console

    from simserve.workload.stats import read_columns

    trace = _open(file, format, on_bad_row, option)
    columns = read_columns(trace.requests(), block_size)
    stats = columns.stats()
    console = Console()
    console.print(_traffic_table(trace, stats), _length_table(stats))
    for warning in trace.report.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    if plot is not None:
        from simserve.report.trace_plots import plot_trace

        plot_trace(columns, plot, title=file.name)
        console.print(f"picture: {plot}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def validate(file: File, format: Format = "auto", option: ReaderOptions = None) -> None:
    """Check every row: print ok, or what is wrong where, and exit with status 2."""
    trace = _open(file, format, "drop", option)
    report = trace.report
    if not report.dropped:
        for warning in report.warnings:
            print(f"warning: {warning}")
        print(f"ok: {file}: {counted(report.num_requests, 'request')}, format {trace.format}")
        return
    for reason, count in report.dropped.items():
        rows = ", ".join(map(str, report.dropped_rows[reason]))
        more = ", ..." if count > len(report.dropped_rows[reason]) else ""
        print(f"bad: {file}: {reason}: {count} of {report.num_rows} rows ({rows}{more})")
    try:
        _ = _open(file, format, "error", option).report
    except TraceError as error:
        print(f"first: {error}")
    raise typer.Exit(2)


@app.command()
def convert(
    file: File,
    out: Annotated[Path, typer.Argument(help="File to write, in simserve's own JSON lines.")],
    format: Format = "auto",
    on_bad_row: BadRows = "error",
    option: ReaderOptions = None,
    start_s: Annotated[float | None, typer.Option(help="Cut what arrives earlier (s).")] = None,
    end_s: Annotated[float | None, typer.Option(help="Cut what arrives then or later (s).")] = None,
    spread_ties_s: Annotated[
        float | None, typer.Option(help="Spread equal arrivals over so many seconds.")
    ] = None,
    speedup: Annotated[float | None, typer.Option(help="Divide all times by this.")] = None,
    prompt_len_multiplier: Annotated[float | None, typer.Option(help="Scale prompts.")] = None,
    output_len_multiplier: Annotated[float | None, typer.Option(help="Scale outputs.")] = None,
    truncate_to: Annotated[int | None, typer.Option(help="Cut longer prompts to this.")] = None,
    max_isl: Annotated[int | None, typer.Option(help="Drop requests of longer prompts.")] = None,
    max_osl: Annotated[int | None, typer.Option(help="Cap outputs at this.")] = None,
    num_requests: Annotated[int | None, typer.Option(help="Keep the first so many.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --spread-ties-s.")] = 0,
) -> None:
    """Write a trace in simserve's own format, changed on the way if asked for."""
    from collections import Counter
    from itertools import chain

    from simserve.workload.trace import write_trace
    from simserve.workload.transform import Transforms

    with named_faults():
        transforms = Transforms(
            start_s=start_s,
            end_s=end_s,
            spread_ties_s=spread_ties_s,
            speedup_ratio=speedup,
            prompt_len_multiplier=prompt_len_multiplier,
            output_len_multiplier=output_len_multiplier,
            truncate_to=truncate_to,
            max_isl=max_isl,
            max_osl=max_osl,
            num_requests=num_requests,
        )
    if out.exists() and file.exists() and out.samefile(file):
        raise TraceError(f"{out}: is the trace that is read; name another file")
    trace = _open(file, format, on_bad_row, option)
    counts: Counter[str] = Counter()
    changed = transforms.apply(trace.requests(), counts, seed)
    first = next(changed, None)
    if first is None:
        raise TraceError(f"{file}: the transforms leave no request; nothing was written")
    num_written = write_trace(out, chain([first], changed))
    for warning in trace.report.warnings:
        print(f"warning: {warning}")
    for name, count in (+counts).items():
        print(f"{name}: {counted(count, 'request')}")
    print(f"{counted(num_written, 'request')} written to {out}")


def _open(file: Path, format: str, on_bad_row: str, options: list[str] | None) -> Trace:
    from simserve.workload.trace import open_trace

    given = _reader_options(options)
    return open_trace(file, format=format, on_bad_row=on_bad_row, reader_options=given)


def _reader_options(options: list[str] | None) -> dict[str, Any]:
    """Options of the form KEY=VALUE; values as YAML has them."""
    import yaml

    parsed = {}
    for option in options or []:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise SimserveError(f"-o {option}: must have the form KEY=VALUE")
        try:
            parsed[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SimserveError(f"-o {option}: the value is no YAML") from error
    return parsed


def _traffic_table(trace: Trace, stats: TraceStats) -> Table:
    from rich.table import Table

    table = Table(title=f"{trace.path.name} ({trace.format})", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    hit_percent = 100 * stats.prefix_hit_share
    rate = "{:.3f} requests/s" if (stats.rate_rps or 1.0) >= 0.1 else "{:.3g} requests/s"
    rows = {
        "requests": str(stats.num_requests),
        **_waiting(trace),
        "span": f"{stats.span_s:,.3f} s",
        "rate": _or_dash(stats.rate_rps, rate),
        "CV of the gaps (1: Poisson)": _or_dash(stats.gap_cv, "{:.2f}"),
        "variance / mean of arrivals per 1 s (1: Poisson)": _or_dash(stats.iod, "{:.2f}"),
        "arrivals equal to the one before": str(stats.num_ties),
        f"prefix-hit bound, {stats.block_size}-token blocks": f"{hit_percent:.1f} %",
    }
    for label, value in rows.items():
        table.add_row(label, value)
    return table


def _waiting(trace: Trace) -> dict[str, str]:
    number = trace.report.num_waiting
    return {"of them start after another one's end": str(number)} if number else {}


def _length_table(stats: TraceStats) -> Table:
    from rich.table import Table

    table = Table("tokens")
    for column in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right")
    lengths: dict[str, LengthStats] = {"prompt": stats.prompt_len, "output": stats.output_len}
    for label, length in lengths.items():
        figures = (length.mean, length.p50, length.p90, length.p99, length.max)
        table.add_row(label, *(f"{figure:,.1f}".removesuffix(".0") for figure in figures))
    return table


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
