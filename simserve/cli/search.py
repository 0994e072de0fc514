"""`simserve search`: the highest request rate under bounds, or the best settings of a grid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simserve.cli.options import OverrideOption, QuietOption

if TYPE_CHECKING:
    from simserve.sweep.rate import Bound, RateSearch, Trial

__all__ = ["search"]

_OBJECTIVES = ["output_throughput", "p99_ttft_ms"]


ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG.yaml",
        help="A configuration; for --trials one with a `sweep` section of type grid.",
    ),
]
SloOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=BOUND",
        help="Find the highest request rate that keeps this bound on a number of the summary, "
        "for example --slo p99_ttft_ms=500. Repeatable.",
    ),
]
TrialsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Let Optuna choose a point of the sweep's grid so many times; one that it chooses "
        "again is not run again.",
    ),
]
ObjectiveOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="With --trials: a number of the summary to be good at; of latencies (…_ms) less "
        "is better. Repeatable. Default: output_throughput and p99_ttft_ms.",
    ),
]
RepetitionsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Same as -o metrics.repetitions=N: each rate with N seeds, judged by means."
    ),
]
ToleranceOption = Annotated[
    float, typer.Option(min=0.001, max=1.0, help="How exact the rate shall be, relatively.")
]
JobsOption = Annotated[int, typer.Option(min=1, help="With --trials: points at a time.")]
OutOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="New or empty directory. Default: runs/<name of CONFIG>, with -2, -3, … if that "
        "exists.",
    ),
]


def search(
    config: ConfigArgument,
    slo: SloOption = None,
    trials: TrialsOption = None,
    objective: ObjectiveOption = None,
    repetitions: RepetitionsOption = None,
    tolerance: ToleranceOption = 0.02,
    jobs: JobsOption = 1,
    override: OverrideOption = None,
    out: OutOption = None,
    quiet: QuietOption = False,
) -> None:
    """Find the highest request rate under bounds (--slo), or settings that none beat (--trials).

    The rate is doubled or halved until the bounds begin to fail, then bisected. Every rate has the
    same seeds. With --trials, Optuna chooses points of a grid too large to run in full; what is
    best in one objective without being worse in the others is the Pareto set.

    Exit status: 0 found, 1 no rate keeps the bounds, 2 wrong configuration, 130 interrupted.
    """
    if (slo is None) == (trials is None):
        raise typer.BadParameter("one of the two, please", param_hint="--slo, --trials")
    from simserve.cli.run import free_directory

    repeated = [] if repetitions is None else [f"metrics.repetitions={repetitions}"]
    overrides = [*(override or []), *repeated]
    directory = free_directory(config, out)
    if trials is None:
        _search_rate(config, slo or [], overrides, tolerance, directory, quiet)
    else:
        chosen = objective or _OBJECTIVES
        _search_settings(config, chosen, overrides, trials, jobs, directory, quiet)


def _search_rate(
    config: str, slo: list[str], overrides: list[str], tolerance: float, out: Path, quiet: bool
) -> None:
    from simserve.sweep.rate import parse_bound, search_rate
    from simserve.sweep.summary import write_summary

    bounds = [parse_bound(text) for text in slo]
    found = search_rate(
        config,
        bounds,
        overrides,
        tolerance=tolerance,
        tried=None if quiet else lambda trial: _print_trial(trial, bounds),
    )
    out.mkdir(parents=True, exist_ok=True)
    rows = [{**trial.summary, "rate": trial.rate, "is_met": trial.is_met} for trial in found.trials]
    write_summary(out, sorted(rows, key=lambda row: row["rate"]))
    answer = {
        "rate": found.rate,
        "above": found.above,
        "is_monotone": found.is_monotone,
        "slo": {bound.key: bound.limit for bound in bounds},
    }
    (out / "search.json").write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    typer.echo(_sentence(found, bounds))
    if found.rate is None:
        raise typer.Exit(1)


def _print_trial(trial: Trial, bounds: Sequence[Bound]) -> None:
    numbers = ", ".join(_measured(trial, bound) for bound in bounds)
    num_repetitions = trial.summary.get("num_repetitions", 1)
    of_all = f" ({trial.num_met} of {num_repetitions} repetitions)" if num_repetitions != 1 else ""
    verdict = "keeps the bounds" if trial.is_met else "does not"
    typer.echo(f"{trial.rate:.4g} requests/s: {numbers}: {verdict}{of_all}", err=True)


def _measured(trial: Trial, bound: Bound) -> str:
    value = trial.summary[bound.key]
    return f"{bound.key} " + (f"{value:.4g}" if isinstance(value, int | float) else "none")


def _sentence(found: RateSearch, bounds: Sequence[Bound]) -> str:
    listed = " and ".join(str(bound) for bound in bounds)
    if found.rate is None:
        lowest = min(trial.rate for trial in found.trials)
        return f"no rate keeps {listed}: not even {lowest:.4g} requests/s"
    text = f"{found.rate:.4g} requests/s keep {listed}"
    text += "; no limit was found" if found.above is None else f"; {found.above:.4g} do not"
    if not found.is_monotone:
        text += "\nAt some lower rate the bounds failed: take more requests or --repetitions."
    return text


def _search_settings(
    config: str,
    objectives: list[str],
    overrides: list[str],
    num_trials: int,
    jobs: int,
    out: Path,
    quiet: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from simserve.cli.interrupt import interrupted_once
    from simserve.cli.sweep_progress import SweepProgress, heading
    from simserve.config.sweep_cells import short_names
    from simserve.sweep.settings import search_settings

    with interrupted_once(), SweepProgress(num_trials, enabled=not quiet) as progress:
        found = search_settings(
            config,
            objectives,
            overrides,
            out=out,
            num_trials=num_trials,
            jobs=jobs,
            listener=progress,
        )
    if quiet:
        return
    table = Table(title="Pareto set", title_justify="left")
    for name in (*short_names(found.keys).values(), *objectives):
        table.add_column(heading(name), overflow="fold", justify="right")
    for row in sorted(found.pareto, key=lambda row: row[objectives[0]]):
        settings = (str(row[key]) for key in found.keys)
        table.add_row(*settings, *(f"{row[key]:,.2f}" for key in objectives))
    console = Console()
    console.print(table)
    num_tried = len(found.rows)
    if num_tried < num_trials:
        console.print(f"points tried: {num_tried} (the other trials chose one of them again)")
    console.print(f"summary: {found.directory / 'summary.csv'}", highlight=False, soft_wrap=True)
