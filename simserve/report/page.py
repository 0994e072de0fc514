"""One HTML page that needs nothing else: text, tables and charts as data, drawn by its own script.

The page loads nothing and says so to the browser (its Content-Security-Policy), so it works from a
disk, in a mail or behind a proxy. Equal contents give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from numpy.typing import NDArray

__all__ = ["Cell", "Chart", "Page", "plain", "shown"]

Chart = Mapping[str, Any]
"""What the script draws: `title`, axes `x` and `y`, and `series` or, for a heatmap, `cells`."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Cell(NamedTuple):
    """A cell of a table that shows one thing and is sorted by another."""

    html: str
    value: float | None


class Page:
    """A page that grows from top to bottom."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>", f'<p class="quiet">{escape(subtitle)}</p>']
        self._charts: list[Chart] = []

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        """A paragraph; `kind` is `note` for what should not be overlooked, or `quiet`."""
        self._parts.append(f'<p class="{kind}">{escape(text)}</p>')

    def html(self, html: str) -> None:
        """Markup as it is."""
        self._parts.append(html)

    def tiles(self, facts: Mapping[str, str]) -> None:
        """The few numbers that somebody wants to see first."""
        tiles = (
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
            for name, value in facts.items()
        )
        self._parts.append(f'<div class="tiles">{"".join(tiles)}</div>')

    def charts(self, charts: Sequence[Chart], kind: str = "", *, one_legend: bool = False) -> None:
        """Charts side by side where there is room, with kind `pairs` at most two.

        A chart with `wide` takes a row. `one_legend`: all have the same series, told once above.
        """
        if one_legend:
            self._parts.append(f'<div class="legend" data-legend="{len(self._charts)}"></div>')
            kind = f"{kind} bare"
        places = []
        for chart in charts:
            wide = ' class="wide"' if chart.get("wide") else ""
            places.append(f'<figure{wide} data-chart="{len(self._charts)}"></figure>')
            self._charts.append(chart)
        self._parts.append(f'<div class="charts {kind}">{"".join(places)}</div>')

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table that a click on its header sorts; columns of numbers stand to the right."""
        numeric = [
            all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))
        ]
        kinds = [' class="n"' if is_number else "" for is_number in numeric]
        head = "".join(
            f'<th{kind}><button type="button">{escape(name)}</button></th>'
            for name, kind in zip(header, kinds, strict=True)
        )
        body = "".join(f"<tr>{''.join(map(_td, row, kinds))}</tr>\n" for row in rows)
        self._parts.append(
            f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead>'
            f"<tbody>\n{body}</tbody></table></div>"
        )

    def folded(self, summary: str, text: str) -> None:
        """Long text that opens on a click."""
        self._parts.append(
            f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
        )

    def render(self) -> str:
        """The page."""
        assets = files("simserve.report") / "assets"
        style, script = ((assets / name).read_text("utf-8") for name in ("report.css", "report.js"))
        data = json.dumps(self._charts, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        # The end of a script element would end it within a string as well.
        data = data.replace("<", "\\u003c")
        body = "\n".join(self._parts)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            f"<title>{escape(self._title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
            f'{body}\n<script type="application/json" id="charts">{data}</script>\n'
            f"<script>\n{script}</script>\n</body>\n</html>\n"
        )


def _td(value: object, kind: str) -> str:
    if isinstance(value, Cell):
        sort = "" if value.value is None else f"{value.value:.6g}"
        return f'<td data-v="{sort}">{value.html}</td>'
    if value is None or isinstance(value, int | float):
        sort = "" if value is None or value != value else repr(value)
        return f'<td{kind} data-v="{sort}">{shown(value)}</td>'
    return f"<td{kind}>{escape(str(value))}</td>"


def shown(value: object) -> str:
    """Numbers to three digits at least, whole ones as they are, None as a dash.

    >>> shown(12345.678), shown(0.012345), shown(10.02), shown(99.97), shown(7), shown(None)
    ('12,346', '0.0123', '10.0', '100', '7', '–')
    """
    if value is None or value != value:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def plain(values: NDArray[Any]) -> list[float | None]:
    """Numbers as JSON has them, to six digits; null for NaN.

    >>> import numpy as np
    >>> plain(np.array([0.1234567891, 3.0, np.nan]))
    [0.123457, 3, None]
    """
    rounded = (float(f"{value:.6g}") for value in values.tolist())
    return [None if v != v else int(v) if v.is_integer() else v for v in rounded]
