"""`simserve trace generate`: write one of the named workloads as a trace file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simserve.errors import SimserveError, counted, did_you_mean

if TYPE_CHECKING:
    from simserve.types import TraceRequest
    from simserve.workload.arrivals import ArrivalProcess
    from simserve.workload.lengths import Length

__all__ = ["app", "named_faults", "parse_length"]

app = typer.Typer(
    help=(
        "Write a made-up workload as a trace. A LENGTH is a number, or KIND:KEY=VALUE,... such as "
        "uniform:min=16,max=512, lognormal:mean=1005,sigma=0.8,min=16,max=6000 or "
        "zipf:alpha=1.2,min=16,max=4096."
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[Path, typer.Option(help="File to write.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.")]
NumRequests = Annotated[int, typer.Option(help="How many requests.")]
Rate = Annotated[float, typer.Option(help="Mean arrivals per second; inf: all at once.")]
Burstiness = Annotated[
    float, typer.Option(help="Shape of gamma gaps: 1 is Poisson, below it arrivals clump.")
]
PromptLen = Annotated[str, typer.Option(metavar="LENGTH", help="Tokens of each request's own.")]
OutputLen = Annotated[str, typer.Option(metavar="LENGTH", help="Tokens to generate.")]
PrefixLen = Annotated[str, typer.Option(metavar="LENGTH", help="Tokens of each shared text.")]


@app.command("long_vs_short")
def long_vs_short(
    out: Out,
    num_short: Annotated[int, typer.Option(help="How many short requests.")] = 32,
    long_prompt_len: Annotated[int, typer.Option(help="Prompt of the long request.")] = 16384,
    short_prompt_len: Annotated[int, typer.Option(help="Prompt of each short one.")] = 128,
    long_output_len: Annotated[int, typer.Option(help="Output of the long request.")] = 64,
    short_output_len: Annotated[int, typer.Option(help="Output of each short one.")] = 64,
    position: Annotated[
        str, typer.Option(help="Where the long one stands: first, middle or last.")
    ] = "first",
    gap_s: Annotated[float, typer.Option(help="Between arrivals (s).")] = 0.02,
) -> None:
    """One long prompt among short ones."""
    from simserve.workload import scenarios

    with named_faults():
        requests = scenarios.long_vs_short(
            num_short=num_short,
            long_prompt_len=long_prompt_len,
            short_prompt_len=short_prompt_len,
            long_output_len=long_output_len,
            short_output_len=short_output_len,
            position=position,
            gap_s=gap_s,
        )
        _write(out, requests)


@app.command("multi_turn")
def multi_turn(
    out: Out,
    num_sessions: Annotated[int, typer.Option(help="How many conversations.")] = 16,
    num_turns: Annotated[
        str, typer.Option(metavar="LENGTH", help="Turns of each.")
    ] = "uniform:min=2,max=6",
    think_time_s: Annotated[float, typer.Option(help="Mean pause before a turn (s).")] = 5.0,
    rate: Rate = 1.0,
    burstiness: Burstiness = 1.0,
    prompt_len: PromptLen = "lognormal:mean=200,sigma=0.8,min=8,max=2000",
    output_len: OutputLen = "lognormal:mean=150,sigma=0.7,min=4,max=1000",
    seed: Seed = 0,
) -> None:
    """Conversations: each turn holds the turns before it."""
    from simserve.workload import scenarios

    with named_faults():
        requests = scenarios.multi_turn(
            num_sessions=num_sessions,
            arrival=_arrival(rate, burstiness),
            num_turns=parse_length("num_turns", num_turns),
            prompt_len=parse_length("prompt_len", prompt_len),
            output_len=parse_length("output_len", output_len),
            think_time_s=think_time_s,
            seed=seed,
        )
        _write(out, requests)


@app.command("shared_template")
def shared_template(
    out: Out,
    num_requests: NumRequests = 200,
    num_groups: Annotated[int, typer.Option(help="How many templates.")] = 4,
    zipf_alpha: Annotated[float, typer.Option(help="Skew of their use; 0: all alike.")] = 1.0,
    prefix_len: PrefixLen = "1024",
    rate: Rate = 8.0,
    burstiness: Burstiness = 1.0,
    prompt_len: PromptLen = "uniform:min=32,max=256",
    output_len: OutputLen = "uniform:min=16,max=128",
    seed: Seed = 0,
) -> None:
    """Batch work on a few templates, each a shared beginning."""
    from simserve.workload import scenarios

    with named_faults():
        requests = scenarios.shared_template(
            num_requests=num_requests,
            arrival=_arrival(rate, burstiness),
            num_groups=num_groups,
            zipf_alpha=zipf_alpha,
            prefix_len=parse_length("prefix_len", prefix_len),
            prompt_len=parse_length("prompt_len", prompt_len),
            output_len=parse_length("output_len", output_len),
            seed=seed,
        )
        _write(out, requests)


@app.command("unique_prefix")
def unique_prefix(
    out: Out,
    num_requests: NumRequests = 200,
    header_len: Annotated[int, typer.Option(help="Tokens of its own before the text.")] = 24,
    prefix_len: PrefixLen = "1024",
    rate: Rate = 8.0,
    burstiness: Burstiness = 1.0,
    prompt_len: PromptLen = "uniform:min=32,max=256",
    output_len: OutputLen = "uniform:min=16,max=128",
    seed: Seed = 0,
) -> None:
    """A shared text behind a header of each request's own: nothing can be reused."""
    from simserve.workload import scenarios

    with named_faults():
        requests = scenarios.unique_prefix(
            num_requests=num_requests,
            arrival=_arrival(rate, burstiness),
            header_len=header_len,
            prefix_len=parse_length("prefix_len", prefix_len),
            prompt_len=parse_length("prompt_len", prompt_len),
            output_len=parse_length("output_len", output_len),
            seed=seed,
        )
        _write(out, requests)


@app.command("single_document")
def single_document(
    out: Out,
    num_requests: NumRequests = 24,
    rate: Rate = 0.5,
    burstiness: Burstiness = 1.0,
    prompt_len: PromptLen = "uniform:min=8192,max=24576",
    output_len: OutputLen = "uniform:min=64,max=256",
    seed: Seed = 0,
) -> None:
    """Requests that share nothing; by default few and long."""
    from simserve.workload import scenarios

    with named_faults():
        requests = scenarios.single_document(
            num_requests=num_requests,
            arrival=_arrival(rate, burstiness),
            prompt_len=parse_length("prompt_len", prompt_len),
            output_len=parse_length("output_len", output_len),
            seed=seed,
        )
        _write(out, requests)


@contextmanager
def named_faults() -> Iterator[None]:
    """Turn a ValueError, which names the option at fault, into an error for the user."""
    try:
        yield
    except ValueError as error:
        raise SimserveError(str(error)) from error


def parse_length(name: str, text: str) -> Length:
    """A length distribution from `128` or `KIND:KEY=VALUE,...`.

    Raises:
        ValueError: the text has another form, or a value is out of range; it begins with `name`.
    """
    from simserve.workload import lengths

    kinds: dict[str, Any] = {
        "constant": lengths.ConstantLength,
        "uniform": lengths.UniformLength,
        "lognormal": lengths.LognormalLength,
        "zipf": lengths.ZipfLength,
    }
    kind, _, pairs = (f"constant:value={text}" if text.isdecimal() else text).partition(":")
    if kind not in kinds:
        raise ValueError(
            f"{name}: '{text}' is neither a number nor KIND:KEY=VALUE,..."
            f"{did_you_mean(kind, kinds)}; kinds are {', '.join(kinds)}"
        )
    try:
        length: Length = kinds[kind](**_arguments(kinds[kind], pairs))
    except ValueError as error:
        raise ValueError(f"{name}: '{text}': {error}") from error
    return length


def _arguments(cls: Any, pairs: str) -> dict[str, float]:
    """Arguments of a length distribution from KEY=VALUE,..."""
    known = {field.name: field for field in fields(cls)}
    arguments: dict[str, float] = {}
    for pair in pairs.split(","):
        key, _, value = pair.partition("=")
        if key not in known:
            raise ValueError(f"there is no '{key}'; there are {', '.join(known)}")
        number = int if str(known[key].type).startswith("int") else float
        try:
            arguments[key] = number(value)
        except ValueError:
            wanted = "a whole number" if number is int else "a number"
            raise ValueError(f"{key} must be {wanted}, got '{value}'") from None
    missing = [key for key, field in known.items() if field.default is MISSING]
    missing = [key for key in missing if key not in arguments]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return arguments


def _arrival(rate: float, burstiness: float) -> ArrivalProcess:
    from simserve.workload.arrivals import GammaArrivals, PoissonArrivals

    if burstiness == 1:
        return PoissonArrivals(rate=rate)
    return GammaArrivals(rate=rate, burstiness=burstiness)


def _write(out: Path, requests: Iterator[TraceRequest]) -> None:
    from simserve.workload.trace import write_trace

    print(f"{counted(write_trace(out, requests), 'request')} written to {out}")
