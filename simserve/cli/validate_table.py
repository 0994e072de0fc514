"""A validation as tables on standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simserve.errors import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from simserve.fidelity.validate.validation import Cell, Validation

__all__ = ["print_validation"]

_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "E2EL"}
_COUNTS = {
    "num_steps": "steps",
    "num_preemptions": "preemptions",
    "prefix_hit_tokens": "prefix-hit tokens",
}
_ATTRIBUTED = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "e2el_p50")
"""What fits on a screen; the JSON file has more."""
_RUNS = {
    "scheduling": "our plans, real times",
    "pricing": "real plans, priced",
    "both": "our plans, priced",
}


def print_validation(validation: Validation) -> None:
    """Print one workload."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    _print_head(validation, console)
    _print_metrics(validation, console)
    _print_counts(validation, console)
    _print_steps(validation, console)
    _print_attribution(validation, console)
    if validation.divergence is None:
        console.print("plans: all equal to the engine's")
    else:
        console.print(f"plans: first difference at {validation.divergence}")
    for name, difference in zip(validation.logs, validation.replayed, strict=True):
        equal = difference is None
        found = "all plans equal" if equal else f"PLANS DIFFER at {difference}"
        console.print(f"{name} at its own times: {found}")
    console.print(f"misses: {', '.join(validation.misses) or 'none'}\n")


def _print_head(validation: Validation, console: Console) -> None:
    console.print(f"[bold]{', '.join(validation.logs)}[/bold]")
    console.print(
        f"decisions: {validation.engine}; timing: {validation.profile}, "
        f"host times × {validation.host_scale:.3f}"
    )
    state = (
        "near saturation: TTFT and E2EL have no single value" if validation.near_saturation else ""
    )
    console.print(
        f"1 % on step times moves the median TTFT by {validation.ttft_elasticity:.1f} %"
        + (f": {state}" if state else "")
    )
    if validation.fitted_on:
        console.print(f"NOT BLIND: the profile was fitted on {', '.join(validation.fitted_on)}")
    for remark in validation.remarks:
        console.print(remark)


def _print_metrics(validation: Validation, console: Console) -> None:
    repeats = len(validation.logs)
    of = f", mean of {repeats} runs" if repeats > 1 else ""
    table = _table(f"latency (ms){of}")
    for name in ("", "real", "sim", "error", "scatter", "spread", "larger", "limit", ""):
        table.add_column(name, justify="left" if name in ("", "larger") else "right")
    for cell in validation.cells:
        scale, digits = (1.0, 1) if cell.name == "throughput" else (1000.0, 2)
        table.add_row(
            _title(cell.name),
            _number(cell.real, scale, digits),
            _number(cell.simulated, scale, digits),
            _percent(cell.error, sign=True),
            _percent(cell.scattered_error, sign=True),
            _percent(cell.spread or None),
            cell.larger if cell.spread else "",
            "range" if cell.in_range else _percent(cell.limit),
            _verdict(cell),
        )
    console.print(table)


def _print_counts(validation: Validation, console: Console) -> None:
    texts = [
        f"{_COUNTS[name]} {real:,.0f} real, {simulated:,.0f} simulated"
        for name, (real, simulated) in validation.counts.items()
    ]
    console.print("; ".join(texts))


def _print_steps(validation: Validation, console: Console) -> None:
    table = _table("step times, each of the engine's plans priced")
    for name in ("", "steps", "MAPE", "bias"):
        table.add_column(name, justify="right" if name else "left")
    for name, error in validation.steps.items():
        bias = _percent(error.bias, sign=True)
        table.add_row(name, f"{error.num_steps:,}", _percent(error.mape), bias)
    console.print(table)
    for verdict in validation.step_verdicts:
        value, limit = _percent(verdict.value, sign=True), _percent(verdict.limit)
        mark = "MISS" if verdict.missed else "ok"
        steps = counted(verdict.num_steps, "step")
        console.print(f"{verdict.name} {value}, limit {limit}: {mark} ({steps})")


def _print_attribution(validation: Validation, console: Console) -> None:
    table = _table(f"errors of {validation.logs[0]} by cause")
    table.add_column("")
    for name in _ATTRIBUTED:
        table.add_column(_title(name), justify="right")
    for run, title in _RUNS.items():
        errors = [validation.attribution[name][run] for name in _ATTRIBUTED]
        table.add_row(title, *(_percent(error, sign=True) for error in errors))
    console.print(table)


def _table(title: str) -> Table:
    """A table that stays within 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _title(name: str) -> str:
    metric, _, statistic = name.partition("_")
    return f"{_NAMES[metric]} {statistic}" if statistic else "tokens/s"


def _verdict(cell: Cell) -> str:
    return "" if not cell.judged else "MISS" if cell.missed else "ok"


def _number(value: float | None, scale: float, digits: int) -> str:
    if value is None:
        return "–"
    number = value * scale
    return f"{number:,.{digits if number < 1000 else 1 if number < 10000 else 0}f}"


def _percent(value: float | None, sign: bool = False) -> str:
    if value is None:
        return "–"
    return f"{100 * value:{'+' if sign else ''}.1f} %"
