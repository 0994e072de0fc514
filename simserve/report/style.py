"""One look for all pictures: colours that colour-blind readers can tell apart, quiet axes.

Figures are made directly, never through pyplot: no global state, no display.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "QUIET",
    "Look",
    "dress",
    "legend_above",
    "legend_below_title",
    "legend_of_all",
    "log_ticks",
    "looks",
    "numeral",
    "png",
    "styled",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette (2008), without its yellow, which is too faint on white."""

DASHES = ("-", "--", "-.", ":")

INK = "#333333"
QUIET = "#666666"
GRID = "#DDDDDD"

_RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 11.0,
    "axes.titlesize": 12.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "lines.linewidth": 1.6,
    "path.simplify": True,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in our style, whatever the user's matplotlibrc says."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


class Look(NamedTuple):
    """How to tell one curve from another, also where they cover each other or lack colour."""

    colour: str
    dashes: str


def looks(count: int) -> list[Look]:
    """`count` looks, the same ones in the same order every time."""
    return list(islice(map(Look, cycle(COLOURS), cycle(DASHES)), count))


def legend_above(axes: Axes) -> None:
    """The legend on the line of the title, where it covers no data."""
    columns = len(axes.get_legend_handles_labels()[0])
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=min(columns, 3))


def legend_below_title(axes: Axes) -> None:
    """The legend on a line of its own between title and axes, for long names of few curves."""
    axes.set_title(axes.get_title(loc="left"), pad=24.0)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 0.99), ncols=3, borderaxespad=0.2)


def legend_of_all(figure: Figure) -> None:
    """One legend above all panels, which have the same curves; as many names a row as there is
    room for."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    column_px = 60 + 8 * max(map(len, names))
    columns = max(1, int(figure.get_figwidth() * figure.dpi / column_px))
    figure.legend(handles, names, loc="outside upper left", ncols=columns, fontsize=9.5)


def log_ticks(axes: Axes, which: Literal["x", "y"], sparse: bool) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5 of every decade (sparse: at 1)."""
    from matplotlib.ticker import LogLocator, NullLocator

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0,) if sparse else (1.0, 2.0, 5.0), numticks=30))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: numeral(value))


def numeral(value: float) -> str:
    """A number as every axis, title and legend writes it.

    >>> numeral(1024.0), numeral(1e6), numeral(0.25)
    ('1,024', '1,000,000', '0.25')
    """
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:,.6g}"


def dress(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Title and axis labels."""
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


def png(figure: Figure) -> bytes:
    """The figure as PNG, its ticks as `numeral` has them; equal figures give equal bytes.

    A character that the font lacks, in a label of the user's, is drawn as a box.
    """
    from matplotlib.ticker import ScalarFormatter

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        is_plain = isinstance(axis.get_major_formatter(), ScalarFormatter)
        if is_plain and max(map(abs, axis.get_view_interval())) >= 1000:
            axis.set_major_formatter(lambda value, _: numeral(value))
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing", UserWarning)
        figure.savefig(buffer, format="png", metadata={"Software": "simserve"})
    return buffer.getvalue()
