"""A comparison of two results on standard output: what may not be concluded comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from simserve.fidelity.compare.comparison import Comparison, Number

__all__ = ["print_comparison"]

_SHOWN_ONE_SIDED = 6


def print_comparison(comparison: Comparison, *, all_settings: bool = False) -> None:
    """Print warnings, settings, numbers, step times and where the plans part."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    first, second = comparison.first.name, comparison.second.name
    console.print(f"{first} and {second}")
    _print_verdict(comparison, console)
    _print_settings(comparison, console, all_settings)
    _print_numbers(comparison, console)
    _print_steps(comparison, console)
    for note in (*comparison.first.notes, *comparison.second.notes):
        console.print(f"note: {note}")
    console.print()


def _print_verdict(comparison: Comparison, console: Console) -> None:
    differing = comparison.differing
    if comparison.confounded:
        console.print(
            f"CONFOUNDED: {len(differing)} settings differ, so no difference below can be put "
            "down to one of them:"
        )
    elif differing:
        console.print("one setting differs:")
    else:
        console.print("no recorded setting differs")
    for one in differing:
        console.print(f"  {one}")
    _print_following(comparison, console)
    for name, facts in comparison.missing.items():
        console.print(f"UNATTRIBUTABLE: {name} does not tell its {', '.join(facts)}")
    if comparison.missing:
        console.print("  no ratio is given: record what is missing and measure again")
    if comparison.one_sided:
        shown = ", ".join(comparison.one_sided[:_SHOWN_ONE_SIDED])
        more = len(comparison.one_sided) - _SHOWN_ONE_SIDED
        console.print(
            f"recorded by one of them only: {shown}{f' and {more} more' if more > 0 else ''}"
        )


def _print_following(comparison: Comparison, console: Console) -> None:
    """Settings of two simulations that nobody may have set."""
    from simserve.fidelity.compare.one_variable import following_settings

    engines = (comparison.first.engine, comparison.second.engine)
    if not comparison.confounded or not all((one or "").startswith("simserve") for one in engines):
        return
    following = following_settings(comparison.differing)
    if following:
        console.print(
            f"  where a configuration does not give {' or '.join(following)}, it follows from the "
            "others: give both runs the same to leave one difference"
        )


def _print_settings(comparison: Comparison, console: Console, all_settings: bool) -> None:
    from rich.table import Table

    first, second = comparison.first, comparison.second
    table = Table(title="effective settings", title_justify="left")
    for name in ("", first.name, second.name):
        table.add_column(name, overflow="fold")
    table.add_row("engine", first.engine or "–", second.engine or "–")
    for name in dict.fromkeys([*first.settings, *second.settings]):
        values = [one.settings.get(name, "–") for one in (first, second)]
        if all_settings or values[0] != values[1]:
            table.add_row(name, *map(str, values))
    hits = [_count(one.hit_tokens) for one in (first, second)]
    table.add_row("(hit tokens)", *hits)
    console.print(table)


def _print_numbers(comparison: Comparison, console: Console) -> None:
    from rich.table import Table

    table = Table()
    for name in ("", comparison.first.name, comparison.second.name, "change"):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    if any(row.verdict for row in comparison.telling_rows):
        table.add_column()
    class_name = None
    for row in comparison.telling_rows:
        if row.class_name != class_name:
            table.add_section()
            class_name = row.class_name
        change = "–" if row.change is None else f"{100 * row.change:+.1f} %"
        verdict = [row.verdict] if row.verdict else []
        table.add_row(row.key, _number(row.first), _number(row.second), change, *verdict)
    if comparison.rows:
        console.print(table)
    else:
        console.print("they have no number in common")


def _print_steps(comparison: Comparison, console: Console) -> None:
    from rich.table import Table

    first, second = comparison.first.steps, comparison.second.steps
    if first is None or second is None:
        return
    if comparison.shapes:
        table = Table(title="mean step time (ms) by batch shape", title_justify="left")
        for name in ("", "steps", comparison.first.name, comparison.second.name, "change"):
            table.add_column(name, justify="right" if name else "left", overflow="fold")
        for row in comparison.shapes:
            change = f"{100 * row.change:+.1f} %" if comparison.attributable else "–"
            means = [f"{1000 * mean:.2f}" for mean in row.mean_s]
            table.add_row(row.shape, f"{row.num_steps[0]:,} / {row.num_steps[1]:,}", *means, change)
        console.print(table)
    if comparison.divergence is None:
        console.print("plans: the same numbers of requests, tokens and preemptions in every step")
    else:
        step = comparison.divergence
        console.print(f"plans part at step {step}: {first.text(step)} / {second.text(step)}")


def _number(number: Number) -> str:
    text = _float(number.value)
    if number.interval is not None and number.interval[0] != number.interval[1]:
        text += f" [{_float(number.interval[0])}, {_float(number.interval[1])}]"
    return text


def _float(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
