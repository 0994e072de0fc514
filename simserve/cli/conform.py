"""`simserve conform`: check the scheduler against recorded cases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["conform"]


def conform(
    cases: Annotated[
        list[Path],
        typer.Argument(
            metavar="CASE.json.gz…", help="Recorded cases, or step logs.", show_default=False
        ),
    ],
) -> None:
    """Simulate recorded cases and compare every recorded field.

    Of a real engine's step log (docs/log-format.md) every step's plan is compared, its measured
    times fed back to the scheduler.

    Only a case's configuration and workload are read to simulate it. Prints a line a case, and for
    a difference the first step, the field, what was expected and what came out.

    Exit status: 0 all equal, 1 some differ, 2 a file is not a case.
    """
    from simserve.fidelity.conform.check import check_case

    equal = 0
    for path in cases:
        result = check_case(path)
        if result.difference is None:
            equal += 1
            typer.echo(f"{result.name}: equal ({result.num_steps} steps)")
        else:
            typer.echo(f"{result.name}: DIFFERS at {result.difference}")
    typer.echo(f"{equal} of {len(cases)} cases equal")
    if equal < len(cases):
        raise typer.Exit(1)
