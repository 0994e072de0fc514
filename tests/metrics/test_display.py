"""What Jupyter shows of a result: a table and a picture, that of nothing included."""

from __future__ import annotations

import io
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from simserve.metrics.display import draw
from simserve.metrics.result import RunResult


@pytest.fixture
def result(story: Callable[..., Any]) -> RunResult:
    """One request with a TTFT of 100 ms, gaps of 100 and 300 ms, and one that was turned away."""
    told = story()
    told.arrive("a")
    told.reject("no", at=0.0)
    told.step([0.1, 0.1, 0.3], {"a": 1}, finished=["a"])
    made: RunResult = told.result()
    return made


def test_the_table(result: RunResult) -> None:
    result.warnings = ("<b>",)
    html = result._repr_html_()
    assert html.count("<tr>") == 5
    assert "<tr><th>TTFT</th><td>100.00</td>" in html
    assert "<tr><th>ITL</th><td>200.00</td>" in html
    assert "completed 1, failed 1, duration 0.50 s, output_throughput 6.00 tokens/s," in html
    assert "repetitions" not in html
    result.summary_dict["num_repetitions"] = 3
    assert "0; means over 3 repetitions, curves of the first</p>" in result._repr_html_()
    assert "<p>&lt;b&gt;</p>" in html


def test_the_picture_is_in_it(result: RunResult) -> None:
    _, _, rest = result._repr_html_().partition('src="data:image/png;base64,')
    picture = imread(io.BytesIO(b64decode(rest.partition('"')[0])))
    assert picture.shape[:2] == (240, 900)
    assert picture.min() < 0.5 < picture.max()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunResult], list[Axes]]:
    """The axes of the picture of a result."""

    def axes_of(result: RunResult) -> list[Axes]:
        figures: list[Figure] = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
        draw(result)
        return figures[0].axes

    return axes_of


def test_the_curves_are_the_distributions(
    result: RunResult, drawn: Callable[[RunResult], list[Axes]]
) -> None:
    curves = {axes.get_xlabel(): axes.lines[0].get_xydata() for axes in drawn(result)}
    assert list(curves) == ["TTFT (ms)", "ITL (ms)", "E2EL (ms)"]
    corners = [[round(x), y] for x, y in curves["ITL (ms)"]]
    assert corners == [[100, 0.0], [100, 0.5], [300, 1.0]]
    assert [round(x) for x, _ in curves["E2EL (ms)"]] == [500, 500]


def test_wide_values_are_on_a_logarithmic_axis(
    story: Callable[..., Any], drawn: Callable[[RunResult], list[Axes]]
) -> None:
    told = story()
    for name, duration in (("a", 0.001), ("b", 1.0)):
        told.arrive(name, at=told.now)
        told.step(duration, {name: 1}, finished=[name])
    ttft, itl, _ = drawn(told.result())
    assert ttft.get_xscale() == "log"
    assert not itl.lines  # one token each: there are no gaps


def test_nothing_completed(story: Callable[..., Any]) -> None:
    told = story()
    told.arrive("a")
    html = told.result()._repr_html_()
    assert "<img" not in html
    assert "<tr><th>TTFT</th><td>–</td>" in html
