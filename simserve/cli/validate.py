"""`simserve validate`: how far a simulation is from what a real engine logged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simserve.cli.json_file import JsonOption, write_json
from simserve.errors import ConfigError

__all__ = ["validate"]


def validate(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG.json.gz…",
            help="Step logs; repeats of one workload are put together.",
            show_default=False,
        ),
    ],
    profile: Annotated[
        str, typer.Option(metavar="P", help="Step times: a profile's name, or its file.")
    ],
    json_file: JsonOption = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PERCENT",
            help="Another limit, such as ttft_p50=8, itl=5, "
            "throughput=2 or step_bias=1.5. Repeatable.",
        ),
    ] = None,
    host_scale: Annotated[
        str,
        typer.Option(
            metavar="auto|X",
            help="Factor on host times. auto: from each log's own "
            "schedule() and update() times, judged by the limits for a known host.",
        ),
    ] = "1",
) -> None:
    """Simulate logged workloads on a profile, and compare latencies, steps and plans with the log.

    Requests come at the times at which they were due; nothing else is taken from the log but the
    engine's settings. Beside every error stands the spread: how far apart repeats on the real
    engine are. docs/validate.md describes the report and the default limits.

    Exit status: 0 all within limits, 1 something is not, 2 a file or an option is wrong.
    """
    from simserve.cli.validate_table import print_validation
    from simserve.fidelity.logs.vllm_log import read_vllm_log
    from simserve.fidelity.validate.judged_logs import group_repeats
    from simserve.fidelity.validate.timing import profile_timing
    from simserve.fidelity.validate.tolerances import parse_tolerances
    from simserve.fidelity.validate.workload import validate_workload

    limits, scale = parse_tolerances(tolerance or []), _parse_scale(host_scale)
    read = [read_vllm_log(path) for path in logs]
    # A known host is one log's: repeats ran on others.
    groups = group_repeats(read) if scale is not None else [[log] for log in read]
    validations = []
    for group in groups:
        timing = profile_timing(profile, *group)
        validations.append(validate_workload(group, timing, host_scale=scale, tolerances=limits))
        print_validation(validations[-1])
    write_json(json_file, [one.as_json() for one in validations])
    num_good = sum(not one.misses for one in validations)
    typer.echo(f"{num_good} of {len(validations)} workloads within limits")
    if num_good < len(validations):
        raise typer.Exit(1)


def _parse_scale(text: str) -> float | None:
    """`auto` is None.

    Raises:
        ConfigError: not a positive number.
    """
    if text == "auto":
        return None
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.0 < scale < float("inf"):
        raise ConfigError(f"--host-scale {text}: expected auto or a positive number")
    return scale
