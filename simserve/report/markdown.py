"""Tables that read well in a terminal and render as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["markdown_table"]

_NUMBER = re.compile(r"[+−-]?[\d,]+(\.\d+)?( %)?|–|")


def markdown_table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is the header; columns of numbers stand to the right.

    >>> print("\\n".join(markdown_table([["case", "µs"], ["b1", "7.5"], ["b64", "1,135.3"]])))
    | case |      µs |
    | ---- | ------: |
    | b1   |     7.5 |
    | b64  | 1,135.3 |
    """
    header, *body = cells
    columns = range(len(header))
    widths = [max(3, *(len(row[i]) for row in cells)) for i in columns]
    numeric = [all(_NUMBER.fullmatch(row[i]) for row in body) for i in columns]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(_pad(row[i], widths[i], numeric[i]) for i in columns) + " |"

    rule = ["-" * (widths[i] - 1) + ":" if numeric[i] else "-" * widths[i] for i in columns]
    return [line(header), line(rule), *(line(row) for row in body)]


def _pad(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)
