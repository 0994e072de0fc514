"""`simserve validate`: how far a simulation is from what a real engine logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from simserve.cli.json_file import JsonOption, write_json
from simserve.errors import ConfigError, SimserveError, TraceError

if TYPE_CHECKING:
    from simserve.fidelity.logs.vllm_log import StepLog
    from simserve.fidelity.validate.validation import Validation

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
    engine are. docs/validate.md describes the report and the default limits. A log that cannot be
    judged does not keep the others from it.

    Exit status: 0 all within limits, 1 something is not, 2 a file or an option is wrong.
    """
    from simserve.fidelity.validate.judged_logs import group_repeats
    from simserve.fidelity.validate.tolerances import parse_tolerances

    limits, scale = parse_tolerances(tolerance or []), _parse_scale(host_scale)
    read, refused = _read(logs, by_host=scale is None)
    # A known host is one log's: repeats ran on others.
    groups = group_repeats(read) if scale is not None else [[log] for log in read]
    found, more = _judge(groups, profile, scale, limits)
    refused += more
    judged = [one.as_json() for one in found]
    write_json(json_file, judged + [one.as_json() for one in refused])
    num_good = sum(not one.misses for one in found)
    if found:
        typer.echo(f"{num_good} of {len(found)} workloads within limits")
    for one in refused:
        typer.echo(f"not judged: {one.error}", err=True)
    if refused:
        raise typer.Exit(refused[0].error.exit_code)
    if num_good < len(found):
        raise typer.Exit(1)


class _Refused(NamedTuple):
    """A log, or repeats, that cannot be judged."""

    files: Sequence[Path]
    error: SimserveError

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"files": [str(file) for file in self.files], "error": str(self.error)}


def _read(files: Sequence[Path], by_host: bool) -> tuple[list[StepLog], list[_Refused]]:
    """The logs that can be judged, and the others."""
    from simserve.fidelity.logs.vllm_log import read_vllm_log
    from simserve.fidelity.validate.judged_logs import check_can_be_judged

    logs, refused = [], []
    seen: set[Path] = set()
    for file in files:
        try:
            if file.resolve() in seen:
                raise TraceError(f"{file}: is named twice; a log is no repeat of itself")
            seen.add(file.resolve())
            log = read_vllm_log(file)
            check_can_be_judged(log, by_host=by_host)
        except SimserveError as error:
            refused.append(_Refused([file], error))
        else:
            logs.append(log)
    return logs, refused


def _judge(
    groups: Sequence[Sequence[StepLog]],
    profile: str,
    scale: float | None,
    limits: Mapping[str, float],
) -> tuple[list[Validation], list[_Refused]]:
    """Judge workloads and print each; what cannot be judged is given back."""
    from simserve.cli.validate_table import print_validation
    from simserve.fidelity.validate.timing import profile_timing
    from simserve.fidelity.validate.workload import validate_workload

    found, refused = [], []
    for group in groups:
        timing = profile_timing(profile, *group)
        try:
            one = validate_workload(group, timing, host_scale=scale, tolerances=limits)
        except SimserveError as error:
            refused.append(_Refused([log.path for log in group], error))
        else:
            print_validation(one)
            found.append(one)
    return found, refused


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
