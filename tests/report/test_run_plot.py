"""The picture of a run: right size, same bytes every time, and drawn for odd runs as well."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.figure import Figure

from simserve.metrics.options import MetricOptions, RunInfo
from simserve.metrics.recorder import RunRecorder
from simserve.metrics.result import RunResult
from simserve.metrics.rundir import read_run
from simserve.protocols import StepRecord
from simserve.report.activity import MAX_SLICES, Signal, envelope, over_time, reach
from simserve.report.run_plot import draw_run
from simserve.report.style import png
from simserve.types import Kind, Request, StepOutput, StepPlan, StepResult, StepRun, TraceRequest


def toy_run(num_requests: int, rate: float = 20.0, num_blocks: int = 400) -> RunResult:
    """A little engine: whole prompts, one token a step, blocks as tokens, newest is preempted."""
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests)).tolist()
    lengths = rng.integers(5, 120, num_requests).tolist()
    recorder = RunRecorder(num_gpu_blocks=num_blocks + 1, block_size=1)
    waiting: list[Request] = []
    running: list[Request] = []
    now, step = 0.0, 0
    while arrivals or waiting or running:
        if not waiting and not running:
            now = max(now, arrivals[0])
        while arrivals and arrivals[0] <= now:
            name = str(num_requests - len(arrivals))
            trace = TraceRequest(
                request_id=name,
                arrival_s=arrivals.pop(0),
                prompt=((name, lengths[int(name)]),),
                output_len=30,
                class_="long" if lengths[int(name)] > 60 else "short",
            )
            recorder.arrived(trace, now)
            waiting.append(Request(trace, 4096))
        plan = StepPlan(step)
        while sum(r.num_tokens + 1 for r in running) > num_blocks:
            waiting.insert(0, running.pop())
            plan.preempted_ids.append(waiting[0].request_id)
            waiting[0].num_computed_tokens = 0
        while waiting and not plan.preempted_ids:
            if sum(r.num_tokens + 1 for r in (*running, waiting[0])) > num_blocks:
                break
            running.append(waiting.pop(0))
            again = running[-1].num_output_tokens > 0
            plan.kinds[running[-1].request_id] = Kind.RESUMED if again else Kind.NEW
        plan.request_ids = [r.request_id for r in running]
        plan.starts = [r.num_computed_tokens for r in running]
        plan.num_tokens = [r.num_tokens - r.num_computed_tokens for r in running]
        end = np.array([now + 0.005 + 0.0002 * plan.total_num_tokens])
        used = sum(r.num_tokens for r in running)
        for request in running:
            request.num_computed_tokens = request.num_tokens
            request.num_tokens += 1
        over = [r for r in running if r.num_output_tokens == r.max_tokens]
        running = [r for r in running if r not in over]
        ones = [1] * len(plan.request_ids)
        recorder.stepped(
            StepRecord(
                StepRun(plan),
                now,
                StepResult(end, {}, ones),
                StepOutput(ones, over),
                now,
                len(ones),
                len(waiting),
                np.array([num_blocks - used]),
                np.array([0]),
            )
        )
        now, step = float(end[0]), step + 1
    recorder.ended("completed", now, [])
    return RunResult.of(recorder.data(), RunInfo(label="測 toy"), MetricOptions())


@pytest.fixture(scope="module")
def toy() -> RunResult:
    return toy_run(200)


@pytest.fixture(scope="module")
def picture(toy: RunResult) -> bytes:
    return draw_run(toy)


def size(png: bytes) -> tuple[int, ...]:
    assert png.startswith(b"\x89PNG\r\n")
    return struct.unpack(">II", png[16:24])


def test_a_picture_has_1600_by_1000_pixels_and_the_same_bytes_every_time(
    toy: RunResult, picture: bytes
) -> None:
    assert size(picture) == (1600, 1000)
    assert draw_run(toy) == picture


def test_thousands_have_commas_and_small_numbers_keep_their_digits() -> None:
    figure = Figure()
    large, small = figure.subplots(2)
    large.plot([0.0, 2000.0])
    small.plot([0.0, 1.0])
    png(figure)
    assert {"0", "1,000", "2,000"} <= {label.get_text() for label in large.get_yticklabels()}
    assert {"0.0", "0.2", "1.0"} <= {label.get_text() for label in small.get_yticklabels()}


def test_a_run_read_back_draws_the_same_picture(
    toy: RunResult, picture: bytes, tmp_path: Path
) -> None:
    toy.save(tmp_path / "run")
    assert draw_run(read_run(tmp_path / "run")) == picture


def test_the_picture_shows_the_data(toy: RunResult, picture: bytes) -> None:
    assert toy.summary_dict["num_preemptions"]
    assert draw_run(toy_run(200, rate=200.0)) != picture


def test_neither_a_users_style_nor_pyplot_matters(toy: RunResult, picture: bytes) -> None:
    import matplotlib

    before = "matplotlib.pyplot" in sys.modules
    with matplotlib.rc_context({"lines.linewidth": 9.0, "figure.facecolor": "black"}):
        assert draw_run(toy) == picture
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize("num_requests", [0, 1])
def test_runs_with_nothing_to_show_are_drawn_too(num_requests: int) -> None:
    assert size(draw_run(toy_run(num_requests))) == (1600, 1000)


def test_long_runs_are_thinned_to_their_range() -> None:
    """Every extreme of a per-step value survives in the band between least and most."""
    when_s = np.arange(100_001) * 0.01
    values = np.zeros(100_000)
    values[[7, 50_000, 99_999]] = [5.0, -3.0, 8.0]
    when, low, middle, high = envelope(Signal(when_s, values))
    assert len(when) == MAX_SLICES + 1
    assert (low.min(), high.max()) == (-3.0, 8.0)
    assert np.all((low <= middle) & (middle <= high))


def test_means_are_over_time_and_idle_time_is_zero() -> None:
    """Steps of 1 s at 0 s, 1 s and 1,000 s: two requests run, one, and one after a long pause."""
    result = toy_run(1)
    steps = {
        "start_s": [0.0, 1.0, 1000.0],
        "end_s": [1.0, 2.0, 1001.0],
        "num_running": [2, 1, 1],
        "num_waiting": [0, 3, 0],
    }
    result.steps_table = pa.table(steps)
    running = over_time(result, "num_running")
    assert running.when_s.tolist() == [0.0, 1.0, 2.0, 1000.0, 1001.0]
    assert running.values.tolist() == [2.0, 1.0, 0.0, 1.0]
    assert over_time(result, "num_waiting").values.tolist() == [0.0, 3.0, 3.0, 0.0]
    assert envelope(running).mean.tolist() == [2.0, 1.0, 0.0, 1.0, 1.0]
    assert reach(running).high[[0, 1, -2]].tolist() == [2.0, 0.0, 1.0]  # never less than a slice
    when, low, mean, high = envelope(running, slices=2)
    assert when.tolist() == [0.0, 500.5, 1001.0]
    assert mean[:2].tolist() == pytest.approx([3 / 500.5, 1 / 500.5])
    assert (low.tolist(), high.tolist()) == ([0.0, 0.0, 0.0], [2.0, 1.0, 1.0])


def test_time_of_the_host_between_steps_is_not_idle() -> None:
    """One request runs from 0 s to 5 s in three steps, one ends at 1 s, one never ran."""
    result = toy_run(3)
    result.steps_table = pa.table(
        {
            "start_s": [0.0, 2.0, 4.0, 9.0],
            "end_s": [1.0, 3.0, 5.0, 9.5],
            "num_running": [2, 1, 1, 1],
        }
    )
    result.requests_table = pa.table(
        {"scheduled_s": [0.0, 0.0, None, 9.0], "ended_s": [5.0, 1.0, 0.5, None]}
    )
    running = over_time(result, "num_running")
    assert running.when_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 9.5]
    assert running.values.tolist() == [2.0, 2.0, 1.0, 1.0, 1.0, 0.0, 1.0]


def test_drafts_that_are_verified_are_decode_tokens() -> None:
    """The columns of the steps table go by batch shape; pictures go by what was computed."""
    result = toy_run(1)
    steps = result.steps_table
    four = pa.array([4] * steps.num_rows)  # each step verifies three drafts, say
    for name in ("num_tokens", "num_prefill_tokens"):
        steps = steps.set_column(steps.column_names.index(name), name, four)
    result.steps_table = steps
    prompt = int(result.requests_table["input_length"][0].as_py())
    assert over_time(result, "prefill_tokens").values.tolist() == [prompt, *[0.0] * 29]
    assert over_time(result, "decode_tokens").values.tolist() == [0.0, *[4.0] * 29]
