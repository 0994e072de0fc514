"""Tables of runs: which points make a line, a grid, a front."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from matplotlib.figure import Figure

from simserve.errors import RunDirectoryError, UnknownNameError
from simserve.report import sweep_figures
from simserve.report.contents import page_of
from simserve.report.sweep_figures import draw_heatmap, draw_pareto, draw_percentiles
from simserve.report.sweep_points import MAX_GRIDS, grid, grids, lines, pareto_front, read_sweep

RATE = "workload.synthetic.arrival.rate"
BUDGET = "scheduler.max_num_batched_tokens"
LIMIT = "scheduler.long_prefill_token_threshold"


def table(**columns: list[object]) -> pd.DataFrame:
    return pd.DataFrame(columns)


def sweep(folder: Path, frame: pd.DataFrame, section: dict[str, object]) -> Path:
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"sweep": section}, sort_keys=False))
    rows = frame.assign(point=[f"p{i}" for i in range(len(frame))])
    rows.assign(status=rows.get("status", "completed")).to_parquet(folder / "summary.parquet")
    return folder


def test_lines_are_sorted_and_named() -> None:
    frame = table(x=[2, 1, 1, 2], **{BUDGET: [512, 512, 64, 64]}, y=[4, 3, 2, 1])
    found = list(lines(frame, "x", [BUDGET]))
    assert [line.name for line in found] == [
        "max_num_batched_tokens 64",
        "max_num_batched_tokens 512",
    ]
    assert [line.rows["y"].tolist() for line in found] == [[2, 1], [3, 4]]
    assert all(line.is_curve for line in found)


def test_scenarios_keep_the_order_of_the_file() -> None:
    frame = table(scenario=["vllm", "vllm", "capped"], x=[1, 2, 1], y=[1, 2, 1], v=[3.0, 2.0, 1.0])
    assert [line.name for line in lines(frame, "x", ["scenario"])] == ["vllm", "capped"]
    assert list(grids(frame, "x", "y", "v", ["scenario"]).grids) == ["vllm", "capped"]


def test_too_many_lines_become_a_cloud() -> None:
    frame = table(x=[1] * 9, by=list(range(9)))
    (cloud,) = lines(frame, "x", ["by"])
    assert len(cloud.rows) == 9
    assert not cloud.is_curve


def test_a_grid_takes_means_and_keeps_holes() -> None:
    frame = table(x=[1, 1, 2], y=[10, 10, 20], v=[1.0, 3.0, 5.0])
    found = grid(frame, "x", "y", "v")
    assert (found.xs, found.ys, found.depth) == ([1, 2], [10, 20], 2)
    np.testing.assert_array_equal(found.cells, [[2.0, np.nan], [np.nan, 5.0]])


def test_each_load_has_a_grid_of_its_own() -> None:
    frame = table(**{RATE: [1, 1, 2, 2, 3], BUDGET: [64, 512, 64, 512, 64], LIMIT: [0, 8, 0, 8, 0]})
    frame["v"] = [1.0, 2.0, 3.0, 4.0, np.nan]
    found = grids(frame, BUDGET, LIMIT, "v", [RATE])
    assert found.num_combinations == 2  # nothing is known of rate 3
    assert list(found.grids) == ["rate 1", "rate 2"]
    for name, (low, high) in (("rate 1", (1.0, 2.0)), ("rate 2", (3.0, 4.0))):
        assert found.grids[name][:2] == ([64, 512], [0, 8])
        np.testing.assert_array_equal(found.grids[name].cells, [[low, np.nan], [np.nan, high]])
        assert found.grids[name].depth == 1


def test_of_too_many_loads_the_first_and_the_last_have_a_grid() -> None:
    frame = table(x=[1] * 20, y=[1] * 20, rate=list(range(20)), v=[1.0] * 20)
    found = grids(frame, "x", "y", "v", ["rate"])
    assert found.num_combinations == 20
    assert len(found.grids) == MAX_GRIDS
    assert list(found.grids)[:: MAX_GRIDS - 1] == ["rate 0", "rate 19"]


def test_a_heatmap_says_what_its_panels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = table(
        x=[1, 2] * 9, y=[1] * 18, rate=[i // 2 for i in range(18)], v=[float(i) for i in range(18)]
    )
    drawn: list[Figure] = []
    monkeypatch.setattr(sweep_figures, "png", lambda figure: drawn.append(figure) or b"")
    draw_heatmap(frame, "x", "y", value="v")
    draw_heatmap(frame[:6], "x", "y", value="v", by=["rate"])
    draw_heatmap(frame, "x", "y", value="v", by=["rate"])
    mean, three, eight = drawn
    assert [axes.get_title(loc="left") for axes in mean.axes] == ["v, mean of up to 9 points"]
    assert [axes.get_title(loc="left") for axes in three.axes] == ["rate 0", "rate 1", "rate 2"]
    assert [text.get_text() for text in three.axes[1].texts] == ["2", "3"]
    assert three.get_suptitle() == "v  (each panel has its own colours)"
    assert eight.get_suptitle() == "v  (8 of 9; each panel has its own colours)"
    assert [axes.axison for axes in eight.axes] == [True] * 8 + [False]


def test_nobody_beats_the_front() -> None:
    rng = np.random.default_rng(3)
    more, less = rng.integers(0, 20, (2, 60)).astype(float)
    front = pareto_front(more, less)
    for place in range(60):
        beaten = (more >= more[place]) & (less <= less[place])
        beaten &= (more > more[place]) | (less < less[place])
        twin = np.isin(front, np.flatnonzero((more == more[place]) & (less == less[place])))
        assert bool(twin.any()) == (not beaten.any())
    assert np.all(np.diff(more[front]) > 0)


@pytest.mark.parametrize(
    ("columns", "load", "keys"),
    [
        ({RATE: [1, 2, 1, 2], BUDGET: [64, 64, 512, 512]}, RATE, (BUDGET, RATE)),
        ({LIMIT: [0, 0, 9, 9], BUDGET: [64, 512, 64, 512]}, LIMIT, (BUDGET, LIMIT)),
        ({LIMIT: [0, 9, 0], BUDGET: [64, 64, 512]}, LIMIT, None),  # one at a time
        ({RATE: [1, 2, 4]}, RATE, None),
        ({"scheduler.policy": ["fcfs", "priority"]}, None, None),
    ],
)
def test_what_is_drawn_follows_from_what_was_swept(
    columns: dict[str, list[object]], load: str | None, keys: tuple[str, str] | None, tmp_path: Path
) -> None:
    points = read_sweep(sweep(tmp_path, table(**columns), {"parameters": dict.fromkeys(columns)}))
    assert points.keys == tuple(columns)
    assert points.load_key == load
    assert points.grid_keys == keys


def test_scenarios_are_a_setting(tmp_path: Path) -> None:
    frame = table(scenario=["calm", "busy"], **{RATE: [1, 9]}, seed=[0, 0])
    section = {"scenarios": {"calm": {RATE: 1}, "busy": {RATE: 9}}}
    points = read_sweep(sweep(tmp_path, frame, section))
    assert points.keys == ("scenario", RATE)
    assert points.free == ("scenario",)
    assert points.load_key == RATE


def test_what_a_scenario_sets_is_no_side_of_a_grid(tmp_path: Path) -> None:
    """A cell would be a mean over scenarios that have nothing else in common."""
    columns = {BUDGET: [64, 64, 64, 64, 512, 512], RATE: [1, 2] * 3}
    frame = table(scenario=["a", "a", "b", "b", "c", "c"], **columns)
    settings = {name: {BUDGET: budget} for name, budget in (("a", 64), ("b", 64), ("c", 512))}
    section = {"scenarios": settings, "parameters": {RATE: [1, 2]}}
    points = read_sweep(sweep(tmp_path, frame, section))
    assert points.free == ("scenario", RATE)
    assert points.load_key == RATE
    assert points.grid_keys is None


def test_what_else_varies_is_no_mean_in_a_heatmap(tmp_path: Path) -> None:
    columns = {RATE: [1] * 4 + [2] * 4, BUDGET: [64, 64, 512, 512] * 2, LIMIT: [0, 8] * 4}
    frame = table(**columns, p99_ttft_ms=[float(i) for i in range(8)], p99_itl_ms=[np.nan] * 8)
    frame["output_throughput"] = 100.0 - frame["p99_ttft_ms"]
    points = read_sweep(sweep(tmp_path, frame, {"parameters": dict.fromkeys(columns)}))
    assert points.grid_keys == (BUDGET, LIMIT)
    assert points.panel_keys == (RATE,)
    assert points.heatmaps == ("p99_ttft_ms", "output_throughput")
    page = page_of(tmp_path)
    assert "By workload.synthetic.arrival.rate; colours compare the cells of one chart." in page
    assert page.count('"title":"p99_ttft_ms, rate ') == 2
    assert "mean of up to" not in page
    assert '"cells":[[0,2],[1,3]]' in page
    assert '"cells":[[4,6],[5,7]]' in page


def test_keys_that_end_alike_are_told_apart() -> None:
    keys = ["workload.prompt_len.value", "workload.output_len.value"]
    frame = table(x=[1, 2], **{keys[0]: [8, 16], keys[1]: [4, 2]})
    assert [line.name for line in lines(frame, "x", keys)] == [
        "prompt_len.value 8, output_len.value 4",
        "prompt_len.value 16, output_len.value 2",
    ]
    classes = [f"workload.classes.{i}.prompt_len.value" for i in range(2)]
    frame = table(x=[1], **{classes[0]: [8], classes[1]: [16]})
    (line,) = lines(frame, "x", classes)
    assert line.name == "0.prompt_len.value 8, 1.prompt_len.value 16"
    (line,) = lines(frame, *classes[:1], classes[1:])
    assert line.name == "1.prompt_len.value 16"


def test_a_sweep_that_failed_altogether_is_an_error(tmp_path: Path) -> None:
    frame = table(**{RATE: [1, 2]}, status=["failed", "failed"])
    with pytest.raises(RunDirectoryError, match="all 2 points failed"):
        read_sweep(sweep(tmp_path, frame, {"parameters": {RATE: [1, 2]}}))


def test_a_front_has_numbers_apart_from_each_other_and_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three points in one place, among more than have a number."""
    more = [1.0, 1.001, 1.002, *range(2, 40)]
    frame = table(
        output_throughput=more,
        p99_ttft_ms=[value * 2 for value in more],
        scenario=[f"s{place}" for place in range(len(more))],
        **{BUDGET: [1024 * place for place in range(len(more))]},
    )
    drawn: list[Figure] = []
    monkeypatch.setattr(sweep_figures, "png", lambda figure: drawn.append(figure) or b"")
    draw_pareto(frame.iloc[:20], by=["scenario", BUDGET])
    draw_pareto(frame, by=["scenario", BUDGET])
    draw_pareto(frame)
    few, many, plain = drawn
    texts = few.axes[0].texts
    assert [text.get_text() for text in texts] == [str(number) for number in range(1, 21)]
    few.draw_without_rendering()
    boxes = [text.get_window_extent() for text in texts]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    (key,) = few.legends
    assert key.get_title().get_text() == "scenario ·\nmax_num_batched_tokens"
    assert [text.get_text() for text in key.texts][:2] == ["1:  s0 · 0", "2:  s1 · 1,024"]
    assert [text.get_text() for text in many.legends[0].texts][:2] == [
        "1:  s0 · 0",
        "4:  s3 · 3,072",
    ]
    assert [text.get_text() for text in many.axes[0].texts][:2] == ["1", "4"]
    assert not plain.legends
    assert not plain.axes[0].texts


@pytest.mark.parametrize(
    ("places", "by_factors", "are_ticks"),
    [
        ([64, 128, 256, 512, 1024, 2048, 4096, 8192], True, True),  # powers of two
        ([0, 128, 256, 512, 8192], False, False),  # 0 has no logarithm
        ([4.84608, 8.88775, 9.28125, 9.38231], False, False),  # rates that a search tried
        ([2, 4, 6, 8], False, True),
        ([7], False, True),
    ],
)
def test_ticks_below_a_figure_have_room(
    places: list[float], by_factors: bool, are_ticks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    latencies = [5000.0 + place for place in places]
    frame = table(x=places, **{f"{p}_ttft_ms": latencies for p in ("p50", "p95", "p99")})
    drawn: list[Figure] = []
    monkeypatch.setattr(sweep_figures, "png", lambda figure: drawn.append(figure) or b"")
    draw_percentiles(frame, "x", metrics=["ttft", "ttft", "ttft"])
    drawn[0].draw_without_rendering()
    axes = drawn[0].axes[0]
    assert axes.get_xscale() == ("log" if by_factors else "linear")
    assert (axes.get_xticks().tolist() == places) == are_ticks
    shown = [label for label in axes.get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in shown]
    assert not [(a, b) for a, b in pairwise(boxes) if a.overlaps(b)]
    low, high = axes.get_ylim()
    assert low == 0.0
    assert high > 1.04 * max(latencies)  # the highest marker is whole


def test_figures_name_units_and_settings_that_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = table(
        scenario=["calm", "rush"], rate=[1, 2], output_throughput=[1.0, 2.0], p99_itl_ms=[1.0, 2.0]
    )
    drawn: list[Figure] = []
    monkeypatch.setattr(sweep_figures, "png", lambda figure: drawn.append(figure) or b"")
    draw_heatmap(frame, "scenario", "rate", value="output_throughput")
    draw_pareto(frame, less="p99_itl_ms")
    heatmap, pareto = (figure.axes[0] for figure in drawn)
    assert [label.get_text() for label in heatmap.get_xticklabels()] == ["calm", "rush"]
    assert heatmap.get_title(loc="left") == "output_throughput (tokens/s)"
    assert heatmap.get_ylabel() == "rate (requests/s)"
    assert pareto.get_title(loc="left") == "p99_itl_ms against output_throughput"
    assert pareto.get_xlabel() == "output_throughput (tokens/s)"
    nothing = dict.fromkeys(("x", "p50_itl_ms", "p95_itl_ms", "p99_itl_ms"), np.nan)
    draw_percentiles(frame.assign(**nothing), "x", metrics=["itl"])
    with pytest.raises(UnknownNameError, match="'scenario' does not hold numbers"):
        draw_percentiles(frame, "scenario")


def test_figures_take_arrow_tables_and_name_a_missing_column() -> None:
    frame = table(x=[1, 2], y=[1, 2], p99_ttft_ms=[5.0, 900.0], output_throughput=[1.0, 2.0])
    arrow = pa.Table.from_pandas(frame)
    assert draw_heatmap(arrow, "x", "y") == draw_heatmap(frame, "x", "y")
    with pytest.raises(UnknownNameError, match=r"no column 'p99_tft_ms' .*'p99_ttft_ms'"):
        draw_pareto(arrow, less="p99_tft_ms")
    with pytest.raises(UnknownNameError, match="no column 'offered_request_rate'"):
        draw_percentiles(frame)
