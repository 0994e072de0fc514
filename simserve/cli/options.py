"""Options that several commands share, and what they mean as overrides of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from simserve.errors import ConfigError, Problem

__all__ = [
    "ConfigArgument",
    "GoodputOption",
    "MetricPercentilesOption",
    "OverrideOption",
    "PercentileMetricsOption",
    "QuietOption",
    "SeedOption",
    "metric_overrides",
    "naming_options",
]

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The configuration.")]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--override",
        metavar="KEY=VALUE",
        help="Set one key, for example -o scheduler.max_num_seqs=64. The value is YAML; paths are "
        "relative to the configuration file. Repeatable, the last one wins.",
    ),
]
SeedOption = Annotated[int | None, typer.Option(help="Same as -o seed=N.")]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", help="Print errors only, no progress; warnings are in the summary."),
]
PercentileMetricsOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Latencies to report, of ttft, tpot, itl, e2el, queue_time: "
        "metrics.percentile_metrics.",
    ),
]
MetricPercentilesOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Percentiles of each, such as 50,95,99.9: metrics.percentiles."
    ),
]
GoodputOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Bounds in milliseconds, such as ttft:500,tpot:50: metrics.goodput.",
    ),
]


def metric_overrides(
    seed: int | None,
    percentile_metrics: str | None,
    metric_percentiles: str | None,
    goodput: str | None,
) -> list[str]:
    """The options as `KEY=VALUE` overrides. What they may hold is the configuration's matter.

    >>> metric_overrides(1, None, "50,99.9", "ttft:500")
    ['seed=1', 'metrics.percentiles=[50, 99.9]', 'metrics.goodput={ttft: 500}']
    """
    overrides = []
    if seed is not None:
        overrides.append(f"seed={seed}")
    if percentile_metrics is not None:
        overrides.append(f"metrics.percentile_metrics=[{', '.join(_items(percentile_metrics))}]")
    if metric_percentiles is not None:
        overrides.append(f"metrics.percentiles=[{', '.join(_items(metric_percentiles))}]")
    if goodput is not None:
        bounds = ", ".join(_bound(item) for item in _items(goodput))
        overrides.append(f"metrics.goodput={{{bounds}}}")
    return overrides


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _bound(item: str) -> str:
    metric, colon, bound = item.partition(":")
    if not (metric.strip() and colon and bound.strip()):
        raise typer.BadParameter(f"'{item}' is not METRIC:MILLISECONDS", param_hint="--goodput")
    return f"{metric.strip()}: {bound.strip()}"


@contextmanager
def naming_options(command: str, model: str, options: Mapping[str, str]) -> Iterator[None]:
    """Say what is wrong with a configuration that a command makes of its options by their names.

    Args:
        command: what to name where no option is at fault.
        model: the value of `--model`, which may be a file.
        options: the option that sets a key, by the key's path.

    Raises:
        ConfigError: as raised within; what has a place already keeps it.
    """

    def named(problem: Problem) -> Problem:
        if problem.file is not None:
            return problem
        if problem.path in options:
            return replace(problem, file=options[problem.path], path="")
        of_model = not problem.path and problem.message.startswith(str(Path(model)))
        return replace(problem, file="--model" if of_model else command)

    try:
        yield
    except ConfigError as error:
        raise ConfigError(map(named, error.problems)) from None
