"""The pages in a real browser: drawn in light, dark and on a phone, alive, and silent."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml

from simserve.errors import RunDirectoryError
from simserve.metrics.result import RunResult
from simserve.report.contents import figures_of, page_of
from simserve.report.page import Cell, Page
from simserve.report.run_page import run_page
from simserve.report.sweep_figures import draw_pareto
from simserve.report.sweep_page import TRADED
from simserve.report.sweep_points import read_sweep
from tests.report.chromium import CHROMIUM, Tab, tab
from tests.report.test_run_plot import toy_run

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH")

VALUES = ("p99_ttft_ms", "p99_itl_ms", "output_throughput")
RATE = "workload.synthetic.arrival.rate"
BUDGET = "scheduler.max_num_batched_tokens"
SIZES = {"light": (1400, 900, False), "dark": (1400, 900, True), "phone": (390, 844, False)}


@pytest.fixture(scope="module")
def toy() -> RunResult:
    return toy_run(120)


@pytest.fixture(scope="module")
def run(toy: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save(tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(scope="module")
def real(toy: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its simulation, as --real-gpu leaves them."""
    directory = toy.save(tmp_path_factory.mktemp("runs") / "real")
    toy_run(120, rate=10.0).save(directory / "simulated")
    return directory


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of rates and budgets, one point of which failed."""
    directory = tmp_path_factory.mktemp("sweeps") / "grid"
    directory.mkdir()
    parameters = {RATE: [2, 4], BUDGET: [512, 1024, 2048]}
    (directory / "sweep.yaml").write_text(yaml.safe_dump({"sweep": {"parameters": parameters}}))
    rows = [
        {
            "point": f"rate={rate},budget={budget}",
            RATE: rate,
            BUDGET: budget,
            "status": "completed",
            "completed": 10,
            "output_throughput": 100.0 * rate + budget / 100,
            **{
                f"{percentile}_{metric}_ms": rate * float(percentile[1:]) + budget / 10
                for metric in ("ttft", "itl", "e2el")
                for percentile in ("p50", "p95", "p99")
            },
        }
        for rate in (2, 4)
        for budget in (512, 1024, 2048)
    ]
    swept = {key: rows[-1][key] for key in ("point", RATE, BUDGET)}
    rows[-1] = {**swept, "status": "failed", "failure": "too <big>"}
    pd.DataFrame(rows).to_parquet(directory / "summary.parquet")
    return directory


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(params=["real", "sweep"])
def directory(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def written(directory: Path, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(page_of(directory))
    return path


@needs_chromium
@pytest.mark.parametrize("look", SIZES)
def test_every_chart_is_drawn(directory: Path, look: str, browser: Tab, tmp_path: Path) -> None:
    width, height, dark = SIZES[look]
    page = written(directory, tmp_path)
    browser.open(page, width=width, height=height, dark=dark)
    browser.screenshot(tmp_path / f"{directory.name}-{look}.png")
    drawn = browser.value(
        "[...document.querySelectorAll('figure svg')].map("
        "(svg) => svg.querySelectorAll('path, circle, rect').length)"
    )
    assert len(drawn) == page.read_text().count("<figure")
    assert min(drawn) >= 1
    legends = browser.value(
        "[...document.querySelectorAll('[data-legend]')].map("
        "(legend) => [...legend.children].map((name) => name.textContent))"
    )
    names = [f"max_num_batched_tokens {budget}" for budget in ("512", "1,024", "2,048")]
    assert legends == ([names] if directory.name == "grid" else [])
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]  # nothing but the page itself
    assert browser.value("document.documentElement.scrollWidth") <= width
    red = browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(red) < 64) == dark


@needs_chromium
@pytest.mark.parametrize("budgets", [[64, 128, 512, 2048, 8192, 16384], [0, 128, 256, 16384]])
@pytest.mark.parametrize("width", [1400, 390])
def test_numbers_below_an_axis_have_room(
    budgets: list[int], width: int, sweep: Path, browser: Tab, tmp_path: Path
) -> None:
    copy = shutil.copytree(sweep, tmp_path / "copy")
    frame = pd.read_parquet(sweep / "summary.parquet").iloc[:1]
    rows = [frame.assign(**{BUDGET: budget}) for budget in budgets]
    pd.concat(rows).to_parquet(copy / "summary.parquet")
    browser.open(written(copy, tmp_path), width=width, height=900)
    ends = browser.value(
        "[...document.querySelector('figure svg').querySelectorAll('text[text-anchor=middle]')]"
        ".map((text) => text.getBoundingClientRect()).slice(0, -2)"  # what follows names the axes
        ".map((box) => [box.left, box.right])"
    )
    assert len(ends) >= 3
    assert all(left[1] < right[0] for left, right in pairwise(ends))


def test_a_sweep_of_which_one_point_is_left_is_a_point(sweep: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sweep, tmp_path / "copy")
    pd.read_parquet(sweep / "summary.parquet").iloc[:1].to_parquet(copy / "summary.parquet")
    assert '<p class="quiet">1 point</p>' in page_of(copy)


@needs_chromium
@pytest.mark.parametrize(("name", "said"), [("run", "running"), ("sweep", "TTFT (ms)")])
def test_the_pointer_tells_values(
    name: str, said: str, browser: Tab, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    browser.open(written(request.getfixturevalue(name), tmp_path), width=1200, height=900)
    figure = 3 if name == "run" else 0
    place = browser.value(
        f"(() => {{ const figure = document.querySelectorAll('figure')[{figure}];"
        "figure.scrollIntoView(); const mark = figure.querySelector('circle') || figure"
        ".querySelector('svg'); const box = mark.getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )
    tip = f"document.querySelectorAll('figure')[{figure}].querySelector('.tip')"
    assert browser.value(f"{tip}.hidden")
    browser.mouse("mouseMoved", *place)
    assert not browser.value(f"{tip}.hidden")
    assert said in browser.value(f"{tip}.textContent")


@needs_chromium
def test_a_click_sorts_a_table(run: Path, browser: Tab, tmp_path: Path) -> None:
    browser.open(written(run, tmp_path), width=1200, height=900)
    column = (
        "[...[...document.querySelectorAll('table')].at(-1).tBodies[0].rows]"
        ".map((row) => Number(row.cells[9].dataset.v))"
    )
    head = "[...[...document.querySelectorAll('table')].at(-1).tHead.rows[0].cells][9]"
    before = browser.value(column)
    browser.value(f"{head}.querySelector('button').click()")
    assert browser.value(column) == sorted(before)
    browser.value(f"{head}.querySelector('button').click()")
    assert browser.value(column) == sorted(before, reverse=True)
    assert browser.value(f"{head}.getAttribute('aria-sort')") == "descending"


def test_pages_have_the_same_bytes_every_time(directory: Path) -> None:
    assert page_of(directory) == page_of(directory)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("real", {"latencies.png", "load.png", "batches.png", "simulated-against-real.png"}),
        ("sweep", {"percentiles.png", *(f"heatmap-{value}.png" for value in VALUES),
                   "pareto-p99_ttft_ms.png", "pareto-p99_itl_ms.png"}),
    ],
)  # fmt: skip
def test_figures(name: str, figures: set[str], request: pytest.FixtureRequest) -> None:
    made = figures_of(request.getfixturevalue(name))
    assert set(made) == figures
    assert all(picture.startswith(b"\x89PNG") for picture in made.values())
    assert len(set(made.values())) == len(made)


def test_figures_have_the_same_bytes_every_time(sweep: Path) -> None:
    frame = read_sweep(sweep).frame
    assert draw_pareto(frame) == draw_pareto(frame)


def test_a_page_holds_all_that_it_needs(directory: Path) -> None:
    page = page_of(directory)
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|<link|<img|@import|url\(", page)


def test_the_page_says_what_was_measured(run: Path, toy: RunResult) -> None:
    page = page_of(run)
    summary = toy.summary_dict
    assert f"<b>{summary['p99_ttft_ms']:,.0f} ms</b><span>p99 TTFT</span>" in page
    assert page.count('class="bar"') == summary["num_prompts"]


def test_rejected_requests_are_counted_and_stand_last() -> None:
    toy = toy_run(30)
    status = ["rejected"] * 29 + ["completed"]
    errors = [*(f"{row} tokens are too many" for row in range(29)), None]
    for name, values in (("status", status), ("error", errors)):
        place = toy.requests_table.column_names.index(name)
        toy.requests_table = toy.requests_table.set_column(place, name, pa.array(values))
    toy.summary_dict |= {"completed": 0, "rejected": 29}
    page = run_page({"toy": toy})
    assert "No request completed: there are no latencies." in page
    assert '<p class="note">29 rejected, such as: 0 tokens are too many</p>' in page
    assert "<b>29</b><span>rejected</span>" in page
    rows = re.findall("<td>(rejected|completed)</td>", page)
    assert rows == ["completed", *["rejected"] * 29]


def test_means_over_repetitions_are_called_so() -> None:
    toy = toy_run(3)
    assert "repetitions" not in run_page({"toy": toy}).partition("Configuration")[0]
    toy.summary_dict |= {"num_repetitions": 5}
    assert "means over 5 repetitions; curves and requests are those of the" in run_page({"a": toy})


def test_the_prefix_cache_is_told_by_prompts_first() -> None:
    toy = toy_run(3)
    toy.summary_dict |= {"total_cached_tokens": 50, "total_input_tokens": 200}
    toy.summary_dict |= {"prefix_cache_hits": 4000, "prefix_cache_queries": 9000}
    page = run_page({"toy": toy})
    assert "<b>25.0 %</b><span>of prompt tokens came from the prefix cache</span>" in page
    assert "prefix_cache_queries: 4,000 of 9,000 tokens; a request that waits is" in page


def test_points_that_no_other_beats_are_numbered_and_told(sweep: Path) -> None:
    page = page_of(sweep)
    charts = json.loads(page.partition('id="charts">')[2].partition("</script>")[0])
    by_title = {chart["title"]: chart.get("series") for chart in charts}
    for less in ("p99_ttft_ms", "p99_itl_ms"):
        front = by_title[f"{less} against throughput"][-1]
        assert front["numbers"] == [1, 2, 3, 4, 5]  # of more throughput for more latency each
        assert front["text"][3] == "max_num_batched_tokens 512\nrate 4"
    table = page.partition("which no other beats:")[2].partition("</table>")[0]
    names = re.findall(r'<button type="button">([^<]+)<', table)
    assert names == ["number", "max_num_batched_tokens", "rate", *TRADED]
    rows = [re.findall(r'data-v="([^"]+)"', row) for row in table.split("<tr>")[2:]]
    assert [row[:3] for row in rows[2:4]] == [["3", "2048", "2"], ["4", "512", "4"]]
    assert len(rows) == 5


def test_warnings_of_points_are_on_the_page(sweep: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sweep, copy)
    frame = pd.read_parquet(sweep / "summary.parquet")
    said = ["not <measured>", *(f"outside {'abcdef'[i]}" for i in range(len(frame) - 1))]
    frame.assign(warnings=said).to_parquet(copy / "summary.parquet")
    page = page_of(copy)
    assert '<p class="note">not &lt;measured&gt; (1 of 5 points)</p>' in page
    assert '<p class="note">outside c' not in page  # folded, and the failed point has none
    assert "outside c (1 of 5 points)\noutside d (1 of 5 points)</pre>" in page


def test_warnings_that_differ_in_numbers_are_told_once(sweep: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sweep, copy)
    frame = pd.read_parquet(sweep / "summary.parquet")
    frame.assign(warnings=[f"{i} outside" for i in range(len(frame))]).to_parquet(
        copy / "summary.parquet"
    )
    note = '<p class="note">0 outside (5 of 5 points, with other numbers)</p>'
    assert note in page_of(copy)


def test_a_failed_point_is_named(sweep: Path) -> None:
    assert "1 of 6 points failed" in page_of(sweep)
    assert "<td>too &lt;big&gt;</td>" in page_of(sweep)


def test_text_cannot_break_out_of_a_page() -> None:
    page = Page("<script>1</script>", "a & b")
    page.table(["<i>", "n"], [["</td>", 1], ["x", None]])
    page.charts([{"title": "</script><script>alert(1)</script>"}])
    html = page.render()
    assert "<script>1" not in html
    assert "alert(1)</script>" not in html
    assert '<td>&lt;/td&gt;</td><td class="n" data-v="1">1</td>' in html
    charts = re.search(r'id="charts">(.*?)</script>', html, re.S)
    assert charts
    assert json.loads(charts[1])[0]["title"] == "</script><script>alert(1)</script>"


def test_cells_sort_by_their_value() -> None:
    page = Page("t", "")
    page.table(["bar"], [[Cell("<b>x</b>", 0.5)], [Cell("", None)], [np.nan]])
    assert '<td data-v="0.5"><b>x</b></td>' in page.render()
    assert '<td data-v=""></td>' in page.render()


@pytest.mark.parametrize("num_requests", [0, 1])
def test_runs_with_nothing_to_show_have_a_page_too(num_requests: int, tmp_path: Path) -> None:
    assert "<h1>" in page_of(toy_run(num_requests).save(tmp_path / "empty"))


def test_figures_of_nothing(tmp_path: Path) -> None:
    assert set(figures_of(toy_run(0).save(tmp_path / "empty"))) == {
        "latencies.png",
        "load.png",
        "batches.png",
    }


def test_what_is_neither_a_run_nor_a_sweep(tmp_path: Path, sweep: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"summary\.json"):
        page_of(tmp_path)
    (tmp_path / "sweep.yaml").touch()
    with pytest.raises(RunDirectoryError, match=r"there is no summary\.parquet in it; `simserve"):
        page_of(tmp_path)
    (tmp_path / "sweep.yaml").write_text((sweep / "sweep.yaml").read_text())
    with pytest.raises(RunDirectoryError, match="no directory of a finished sweep"):
        page_of(tmp_path)
