"""`--json F`: everything that a command found, for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from simserve.errors import SimserveError

__all__ = ["JsonOption", "write_json"]

JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="F", help="Write all of it there, as JSON.")
]


def write_json(path: Path | None, content: Sequence[dict[str, Any]]) -> None:
    """Write a list of objects, if a file is named.

    Raises:
        SimserveError: it cannot be written.
    """
    if path is None:
        return
    text = json.dumps(content, indent=2, allow_nan=False)
    try:
        path.write_text(text + "\n", encoding="utf-8", newline="\n")
    except OSError as error:
        raise SimserveError(f"--json {path}: cannot be written: {error}") from error
