"""What the benchmarks print and write: Markdown tables, and JSON that says where it is from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from simserve.errors import SimserveError

__all__ = ["check_writable", "command_line", "print_table", "write_measurement"]


def check_writable(path: Path | None) -> None:
    """Find out before a long measurement whether its file could be written.

    Raises:
        SimserveError: it could not.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimserveError(f"{path}: cannot be written: {error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SimserveError(f"{path}: cannot be written; name another file for --json")


def command_line(command: str, options: Mapping[str, object]) -> list[str]:
    """Words of a command; options of None are left out, lists repeated."""
    words = ["simserve", "bench", command]
    for option, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [] if one is None else [option, str(one)]
    return words


def write_measurement(
    path: Path | None, command: Sequence[str], content: Mapping[str, Any]
) -> None:
    """Write a measurement with its command line, date and environment; to None: nothing.

    Raises:
        SimserveError: the file cannot be written.
    """
    if path is None:
        return
    from datetime import UTC, datetime

    from simserve.config.environment import collect

    facts = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": collect(),
    }
    text = json.dumps({**facts, **content}, indent=1, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SimserveError(f"{path}: cannot be written: {error}") from error


def print_table(cells: Sequence[Sequence[str]]) -> None:
    """Print a table whose first row is the header; nothing if that is all."""
    from simserve.report.markdown import markdown_table

    if len(cells) > 1:
        typer.echo("\n".join(markdown_table(cells)) + "\n")
