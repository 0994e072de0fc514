"""`simserve compare`: results side by side, and whether their difference means anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simserve.cli.json_file import JsonOption, write_json
from simserve.errors import ConfigError, did_you_mean

__all__ = ["compare"]


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN…",
            help="Run directories (simulated or real), step logs "
            "(*.json.gz) or result files (*.json); the first is compared with the others.",
            show_default=False,
        ),
    ],
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=PERCENT",
            help="Largest change of a number, such as p50_ttft_ms=5. Repeatable.",
        ),
    ] = None,
    json_file: JsonOption = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="Show all settings, not only those that differ.")
    ] = False,
) -> None:
    """Compare results: settings first, then latencies, steps by batch shape, and plans.

    If more than one effective setting differs, the difference is confounded. If a result does not
    tell its engine's version, its effective configuration or its hit tokens, no ratio is printed.
    Runs with the same settings are repetitions of one: they give intervals, and intervals that
    overlap are a tie.

    Exit status: 0 done, 1 a number is beyond its tolerance or cannot be judged, 2 a file or an
    option is wrong.
    """
    from simserve.cli.compare_table import print_comparison
    from simserve.fidelity.compare.comparison import compare_results, merge_repetitions
    from simserve.fidelity.compare.result_source import load_result

    limits = _parse_tolerances(tolerance or [])
    results = merge_repetitions([load_result(path) for path in runs])
    if len(results) < 2:
        raise ConfigError(
            "compare needs results under at least two settings; "
            f"{', '.join(map(str, runs))} are one run, or repetitions of one"
        )
    comparisons = [compare_results(results[0], other) for other in results[1:]]
    _check_known(limits, [key for one in results for summary in one.summaries for key in summary])
    missed = []
    for one in comparisons:
        print_comparison(one, all_settings=settings)
        missed += [f"{one.second.name}: {key}" for key in one.misses(limits)]
    write_json(json_file, [one.as_json() for one in comparisons])
    if missed:
        typer.echo(f"beyond tolerance, or not to be judged: {', '.join(missed)}")
        raise typer.Exit(1)


def _check_known(limits: dict[str, float], keys: list[str]) -> None:
    for key in limits:
        if key not in keys:
            raise ConfigError(
                f"--tolerance {key}: no result has such a number{did_you_mean(key, keys)}"
            )


def _parse_tolerances(texts: list[str]) -> dict[str, float]:
    limits = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            percent = float(value)
        except ValueError:
            percent = -1.0
        if not key or not percent >= 0.0:
            raise ConfigError(f"--tolerance {text}: expected KEY=PERCENT, such as p50_ttft_ms=5")
        limits[key] = percent / 100.0
    return limits
