"""`simserve fit`: from step logs of a real engine to a profile."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simserve.errors import ConfigError, counted

if TYPE_CHECKING:
    from simserve.cost.profile_file import ProfileFile
    from simserve.fidelity.logs.loaded_log import LoadedLog

__all__ = ["fit"]


def fit(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG…",
            help="Step logs, directories of real runs, or JSON files of vllm bench forward.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="profile.json", help="The profile to write.")],
    held_out: Annotated[
        list[Path] | None,
        typer.Option(metavar="LOG", help="A log to see errors on. Repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the profile; otherwise that of its file.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Whose profile, if there are logs of several models.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Of results of vllm bench forward that do not say it.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="The same, such as vllm-0.33.0.", metavar="NAME-VERSION")
    ] = None,
    attention_path: Annotated[
        str, typer.Option(help="Kernels and graph modes of step logs, in words.")
    ] = "not said",
    measured_on: Annotated[
        str, typer.Option(help="Machine, software and date of step logs.")
    ] = "not said",
) -> None:
    """Fit what an engine's steps cost, write it as a profile, and print how well it fits.

    A run with executor.kind: real tells its kernels and machine itself.
    Logs of several models may be given: what they share (kernels, host) is fitted together.
    docs/log-format.md describes the logs, docs/cost-models.md the profile.

    Exit status: 0 done, 2 a log or an option is wrong.
    """
    loaded = _load_all([*logs, *(held_out or ())], {"model": model, "gpu": gpu, "engine": engine})
    fitted, unseen = loaded[: len(logs)], loaded[len(logs) :]
    models = sorted({log.model for log in fitted})
    if model is None and len(models) > 1:
        raise ConfigError(f"logs are of {', '.join(models)}: say with --model whose profile it is")
    profile = _fit(
        fitted,
        unseen,
        name=name or out.name.removesuffix(".json"),
        model=model or models[0],
        attention_path=attention_path,
        measured_on=measured_on,
    )
    try:
        out.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error}") from error
    _print(profile, out)


def _load_all(paths: Sequence[Path], facts: Mapping[str, str | None]) -> list[LoadedLog]:
    # Matrices of a fit are small: on a busy machine a second thread is mostly waited for. So the
    # profile does not depend on the number of cores either. NumPy reads this when first imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from simserve.cli.progress import tracking

    with tracking() as track:
        return [_load(path, facts) for path in track(paths, "reading logs")]


def _load(path: Path, facts: Mapping[str, str | None]) -> LoadedLog:
    if path.is_dir():
        from simserve.fidelity.logs.real_run import load_run

        return load_run(path)
    if path.suffix == ".json":
        from simserve.fidelity.logs.forward_results import load_forward_results

        return load_forward_results(path, **facts)
    from simserve.fidelity.logs.loaded_log import load_log
    from simserve.fidelity.logs.vllm_log import read_vllm_log

    return load_log(read_vllm_log(path))


def _fit(
    fitted: list[LoadedLog],
    unseen: list[LoadedLog],
    *,
    name: str,
    model: str,
    attention_path: str,
    measured_on: str,
) -> ProfileFile:
    from simserve.cli.progress import waiting
    from simserve.fidelity.fit.profile import fit_profile
    from simserve.fidelity.fit.runs import fit_runs
    from simserve.fidelity.logs.real_run import RunLog

    runs, unseen_runs = ([x for x in logs if isinstance(x, RunLog)] for logs in (fitted, unseen))
    only_runs = len(runs) + len(unseen_runs) == len(fitted) + len(unseen)
    if (runs or unseen_runs) and not only_runs:
        raise ConfigError("step logs and run directories are of two engines: fit them apart")
    with waiting(f"fitting {counted(len(fitted), 'log')}"):
        if only_runs:
            return fit_runs(runs, unseen_runs, name=name, model=model)
        return fit_profile(
            fitted,
            unseen,
            name=name,
            model=model,
            attention_path=attention_path,
            measured_on=measured_on,
        )


def _print(profile: ProfileFile, out: Path) -> None:
    from simserve.fidelity.fit.report import error_cells
    from simserve.report.markdown import markdown_table

    steps = sum(log.num_steps for log in profile.fitted)
    typer.echo(f"fitted on {steps:,} steps of {counted(len(profile.fitted), 'log')}")
    if profile.errors.get("blind"):
        typer.echo(f"errors on {counted(len(profile.held_out), 'log')} not fitted:")
        for line in markdown_table(error_cells(profile.errors)):
            typer.echo(line)
    else:
        typer.echo("no log was held out (--held-out), so how far off it is is not known")
    typer.echo(f"profile: {out}")
