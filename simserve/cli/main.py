"""The entry point. A command's module is imported when the command runs, not to list it."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from simserve import __version__
from simserve.errors import SimserveError

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "run": (
        "simserve.cli.run:run",
        "Run a configuration and write a run directory.",
    ),
    "sweep": ("simserve.cli.sweep:sweep", "Run a configuration with many values of some keys."),
    "search": (
        "simserve.cli.search:search",
        "Find the highest rate under an SLO, or the best settings.",
    ),
    "conform": ("simserve.cli.conform:conform", "Check the scheduler against recorded cases."),
    "compare": (
        "simserve.cli.compare:compare",
        "Put results side by side: settings, then numbers.",
    ),
    "report": (
        "simserve.cli.report:report",
        "Make one HTML page of a run or a sweep.",
    ),
    "timeline": (
        "simserve.cli.timeline:timeline",
        "Write a run as a trace for Perfetto.",
    ),
    "explain": ("simserve.cli.explain:explain", "Say where one request's time went."),
    "validate": (
        "simserve.cli.validate:validate",
        "Say how far a simulation is from what a real engine logged.",
    ),
    "calibrate": (
        "simserve.cli.calibrate:calibrate",
        "Measure steps on this GPU and make a profile of them.",
    ),
    "fit": ("simserve.cli.fit:fit", "Make a profile from step logs of a real engine."),
    "trace": ("simserve.cli.trace:app", "Inspect, validate, convert, generate and fetch traces."),
    "bench": ("simserve.cli.bench:app", "Measure kernels and whole steps on a GPU."),
    "capacity": ("simserve.cli.capacity:capacity", "Say how many KV blocks fit on a GPU."),
    "schema": ("simserve.cli.schema:schema", "Print the JSON Schema of configurations."),
    "env": ("simserve.cli.env:env", "Print the versions that a report should name."),
}
"""Where each command is, as `module:attribute` (a function or a typer app), and what it does."""


class _LazyGroup(TyperGroup):
    """Lists commands from `COMMANDS`, imports the one that is called, and ends in exit codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (_, summary) in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=summary)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override, unused-ignore]
        """The command itself, imported now."""
        name, stand_in, rest = super().resolve_command(ctx, args)  # type: ignore[arg-type, unused-ignore]
        return name, _load(name) if stand_in and name else stand_in, rest

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override, unused-ignore]
        """Read the options before a command's name; those that only print do it here."""
        with _exit_codes():
            return super().parse_args(ctx, args)  # type: ignore[arg-type, unused-ignore]

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override, unused-ignore]
        """Run a command."""
        with _exit_codes():
            return super().invoke(ctx)  # type: ignore[arg-type, unused-ignore]


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Errors of simserve or files become a message and exit code, Ctrl-C 130."""
    try:
        yield
    except SimserveError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # who reads the output has seen enough: typer ends quietly
        typer.echo(f"cannot read or write: {error}", err=True)
        raise typer.Exit(2) from None
    except typer.BadParameter as error:
        error.message = error.message.removeprefix("Value error, ")  # pydantic's, not a user's word
        raise


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name][0].partition(":")
    target = getattr(import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(rich_markup_mode=None, add_completion=False)
        target.command(name)(function)
    return typer.main.get_command(target)


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would be half of the time that help takes
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"simserve {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=False)
def _simserve(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Replay LLM-serving traces through vLLM's scheduler, on a cost model."""


def _end_as_ctrl_c_does(number: int, frame: FrameType | None) -> None:
    """What is half written is then finished or removed, as each command has it."""
    action = signal.getsignal(signal.SIGINT)
    if callable(action):
        action(number, frame)
    else:  # a shell that starts it in the background has Ctrl-C ignored
        raise KeyboardInterrupt


def main() -> None:
    """Run the command line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not after nohup
            signal.signal(number, _end_as_ctrl_c_does)
    gc.set_threshold(100_000)  # imports make many objects and hardly any garbage
    atexit.register(gc.freeze)  # nor does the end have to look for it, three times over
    # Threads of numpy's BLAS spin for 2**26 ticks without work; with this, for 2**4.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    app(prog_name="simserve")
