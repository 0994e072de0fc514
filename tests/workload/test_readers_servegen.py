"""ServeGen windows: sampled with a seed, at the recorded rate and burstiness."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import gamma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simserve.errors import TraceError
from simserve.workload.trace import open_trace

TraceFile = Callable[..., Path]
TEXT = {"0": {"input_tokens": "{10: 0.25, 30: 0.75, 99: 0.0}", "output_tokens": "{7: 1.0}"}}


@pytest.fixture
def client(trace_file: TraceFile) -> Callable[..., Path]:
    """A client's two files; returns the path of the windows."""

    def write(windows: str, dataset: dict[str, Any] = TEXT) -> Path:
        trace_file(json.dumps(dataset), "chunk-0-dataset.json")
        return trace_file(windows.replace("\n", "\r\n"), "chunk-0-trace.csv")

    return write


def test_the_first_row_is_a_window_and_empty_ones_have_no_requests(client: Any) -> None:
    path = client("0,2,1,Gamma,1,0.5\n600,0,0,,0,0\n1200,2,1,Gamma,1,0.5\n")
    trace = open_trace(path)
    assert trace.format == "servegen"
    times = np.array([r.arrival_s for r in trace.requests()])
    assert trace.report.num_rows == 3
    assert 2100 < len(times) < 2700  # 2/s for 1200 s; the last window is as long as the others
    assert not np.any((times > 601) & (times < 1195))
    assert times[-1] < 1800


@pytest.mark.parametrize(("pattern", "shape"), [("Gamma", 0.25), ("Weibull", 0.6), ("Weibull", 2)])
def test_rate_and_burstiness_are_those_recorded(client: Any, pattern: str, shape: float) -> None:
    """The scale in the file (here: nonsense) must not change the rate."""
    path = client(f"0,20,1,{pattern},{shape},123\n600,0,0,,0,0\n")
    gaps = np.diff([r.arrival_s for r in open_trace(path, seed=3).requests()])
    second_moment = gamma(1 + 2 / shape) / gamma(1 + 1 / shape) ** 2
    cv = 1 / shape**0.5 if pattern == "Gamma" else (second_moment - 1) ** 0.5
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_a_seed_gives_the_same_requests_again_and_another_others(client: Any) -> None:
    path = client("0,2,1,Gamma,0.3,0.5\n")
    again = [list(open_trace(path, seed=seed).requests()) for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_lengths_follow_the_histograms(client: Any) -> None:
    got = list(open_trace(client("0,10,1,Gamma,1,1\n")).requests())
    prompts = np.array([r.prompt_len for r in got])
    assert set(prompts.tolist()) == {10, 30}
    assert np.mean(prompts == 30) == pytest.approx(0.75, abs=0.02)
    assert {r.output_len for r in got} == {7}
    assert len({r.prompt[0][0] for r in got}) == len(got)


def test_a_window_uses_the_latest_histogram_that_is_not_empty(client: Any) -> None:
    dataset = {
        "0": {"input_tokens": "", "output_tokens": "{}"},
        "600": {"input_tokens": "{5: 1.0}", "output_tokens": "{6: 1.0}"},
        "1200": {"input_tokens": "{}", "output_tokens": "{8: 1.0}"},
    }
    windows = "0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n1200,1,1,Gamma,1,1\n"
    pairs = [(r.prompt_len, r.output_len) for r in open_trace(client(windows, dataset)).requests()]
    assert set(pairs) == {(5, 6), (5, 8)}
    with pytest.raises(TraceError, match="input_tokens: no window has a histogram"):
        open_trace(client(windows, {"0": {"output_tokens": "{1: 1}"}})).requests()


def test_media_are_items_of_their_own_identity(client: Any) -> None:
    dataset = {
        "0": {
            "text_tokens": "{4: 1.0}",
            "image_tokens": "{100: 1.0}",
            "image_count": "{2: 1.0}",
            "audio_tokens": "{0: 1.0}",
            "audio_count": "{1: 1.0}",
            "output_tokens": "{9: 1.0}",
            "reason_ratio": "{0.5: 1.0}",
        }
    }
    got = list(open_trace(client("0,1,1,Gamma,1,1\n", dataset)).requests())
    assert [(i.offset, i.length) for i in got[0].mm_items] == [(4, 100), (104, 100)]
    assert got[0].prompt_len == 204
    assert len({i.identifier for r in got for i in r.mm_items}) == 2 * len(got)


def test_slices_and_limits(client: Any) -> None:
    path = client("0,0,0,,0,0\n600,1,1,Gamma,1,1\n1200,1,1,Gamma,1,1\n")
    assert open_trace(path, num_requests=5).num_requests == 5
    assert open_trace(path, start_s=1200.0, duration_s=60.0).report.span_s < 60
    with pytest.raises(TraceError, match="no requests"):
        open_trace(path, duration_s=600.0).requests()
    flood = client("0,1000000,1,Gamma,1,1\n600,1,1,Gamma,1,1\n")
    with pytest.raises(TraceError, match="set the option num_requests or duration_s"):
        open_trace(flood).requests()
    assert open_trace(flood, num_requests=3).num_requests == 3


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("600,-1,1,Gamma,1,1", "rate"),
        ("600,nan,1,Gamma,1,1", "rate"),
        ("600,1,1,Gamma,0,1", "shape"),
        ("600,1,1,Weibull,0.01,1", "shape"),
        ("600,1,1,Pareto,1,1", "pattern"),
        ("600,1,1,,1,1", "pattern"),
        ("0,1,1,Gamma,1,1", "start"),
        ("600,1,1,Gamma,1", "row"),
    ],
)
def test_bad_windows_are_named(client: Any, row: str, field: str) -> None:
    path = client(f"0,1,1,Gamma,1,1\n{row}\n")
    with pytest.raises(TraceError, match=rf"trace\.csv:2: {field}: "):
        open_trace(path).requests()


@pytest.mark.parametrize(
    "text", ["{1: ", "[1, 2]", "{-1: 1}", "{1.5: 1}", "{1: 'x'}", "{1: -1}", "f()", "(" * 10_000]
)
def test_bad_histograms_are_named(client: Any, text: str) -> None:
    dataset = {"0": {"input_tokens": text, "output_tokens": "{1: 1}"}}
    with pytest.raises(TraceError, match=r"dataset\.json: window 0: input_tokens: "):
        open_trace(client("0,1,1,Gamma,1,1\n", dataset)).requests()


def test_the_dataset_is_found_beside_or_named(trace_file: TraceFile, tmp_path: Path) -> None:
    path = trace_file("0,1,1,Gamma,1,1\n", "windows.csv")
    with pytest.raises(TraceError, match="give its path as the option dataset"):
        open_trace(path).requests()
    dataset = trace_file(json.dumps(TEXT), "lengths.json")
    assert open_trace(path, dataset=str(dataset)).num_requests > 0
    assert open_trace(path, dataset=dataset.name).num_requests > 0
    with pytest.raises(TraceError, match=r"none\.json: cannot be read"):
        open_trace(path, dataset=str(tmp_path / "none.json")).requests()
