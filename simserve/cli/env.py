"""`simserve env`: what a bug report should say of the machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ["env"]


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print versions, platform, commit and GPU."""
    from simserve.config.environment import collect

    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {one}" for key, one in value.items())
        typer.echo(f"{name}: {'none' if value is None else value}")
