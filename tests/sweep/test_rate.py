"""The search for a rate: bisection by itself, then on a queue whose capacity is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.config.loader import load_config
from simserve.errors import ConfigError
from simserve.sweep.rate import Bound, bisect, parse_bound, search_rate

# A step takes 10 ms and a request one step, alone: 100 requests a second are all there can be.
QUEUE: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "workload": {
        "synthetic": {
            "num_requests": 100,
            "arrival": {"kind": "constant", "rate": 20},
            "prompt_len": {"kind": "constant", "value": 8},
            "output_len": {"kind": "constant", "value": 1},
        }
    },
    "scheduler": {"max_num_seqs": 1},
    "kv_cache": {"num_gpu_blocks": 50},
    "executor": {"cost": {"kind": "formula", "base_s": 0.01}},
}

FEW = {"workload.synthetic.num_requests": 20}


@given(st.floats(0.01, 100), st.floats(0.001, 0.5))
def test_bisection_finds_where_a_condition_ends(end: float, tolerance: float) -> None:
    low, high = bisect(lambda value: value <= end, 1.0, tolerance)
    assert low is not None
    assert high is not None
    assert low <= end < high <= low * (1 + tolerance)


def test_bisection_gives_up_far_away() -> None:
    assert bisect(lambda _: True, 1.0, 0.1) == (1024.0, None)
    assert bisect(lambda _: False, 1.0, 0.1) == (None, 2**-10)


def test_the_capacity_of_a_queue() -> None:
    """Equal gaps below 10 ms pile up; the last of 100 requests waits 1 s − 99 gaps."""
    found = search_rate(load_config(QUEUE), [Bound("p99_ttft_ms", 11.0)])
    assert found.rate == pytest.approx(100, rel=0.03)
    assert found.above is not None
    assert found.rate < found.above <= found.rate * 1.02
    assert found.is_monotone
    assert all(trial.rate == trial.value for trial in found.trials)


def test_a_trace_is_sped_up(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": i * 0.1, "prompt_len": 8, "output_len": 1, "request_id": str(i)}
        for i in range(50)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {**QUEUE, "workload": {"trace": {"path": "t.jsonl"}}}
    loaded = load_config(config, base_dir=tmp_path)
    found = search_rate(loaded, [Bound("p99_ttft_ms", 11.0)], tolerance=0.1)
    assert found.rate is not None
    assert found.trials[0].value == 1.0
    assert found.trials[0].rate == pytest.approx(50 / 4.9)
    assert found.rate == pytest.approx(100, rel=0.15)


def test_repetitions_are_judged_by_their_means() -> None:
    arrival = {"workload.synthetic.arrival": {"kind": "poisson", "rate": 50}}
    loaded = load_config(QUEUE, {**arrival, "metrics.repetitions": 3, **FEW})
    found = search_rate(loaded, [Bound("p99_ttft_ms", 50.0)], tolerance=0.2)
    for trial in found.trials:
        assert trial.summary["num_repetitions"] == 3
        assert trial.is_met == (trial.summary["p99_ttft_ms"] <= 50.0)
        assert 0 <= trial.num_met <= 3


def test_shares_are_bounded_from_below() -> None:
    goodput = {"metrics.goodput": {"ttft": 20.0}}
    bound = parse_bound("slo_attainment=0.9")
    assert bound.is_least
    found = search_rate(load_config(QUEUE, goodput), [bound], tolerance=0.2)
    assert found.rate is not None
    for trial in found.trials:
        assert trial.is_met == (trial.summary["slo_attainment"] >= 0.9)


def test_what_was_not_measured_keeps_no_bound() -> None:
    assert not Bound("p99_itl_ms", 50.0).is_met(None)
    found = search_rate(load_config(QUEUE, FEW), [Bound("p99_itl_ms", 50.0)])
    assert found.rate is None  # one token a request has no gap


@pytest.mark.parametrize(
    "text",
    [
        "p99_ttft_ms",
        "p99_ttft_ms=x",
        "p99_ttft_ms=-1",
        "status=1",
        "slo_attainment=99",
    ],
)
def test_bounds_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--slo"):
        parse_bound(text)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"set metrics\.goodput, for example -o"):
        search_rate(load_config(QUEUE), [Bound("slo_attainment", 0.9)])
    with pytest.raises(ConfigError, match="did you mean 'p99_ttft_ms'"):
        search_rate(load_config(QUEUE), [Bound("p99_tft_ms", 1.0)])
    immediate = load_config(QUEUE, {"workload.synthetic.arrival": {"kind": "immediate"}})
    with pytest.raises(ConfigError, match="immediate has no rate"):
        search_rate(immediate, [Bound("p99_ttft_ms", 1.0)])


def test_command(tmp_path: Path) -> None:
    config = tmp_path / "queue.yaml"
    config.write_text(json.dumps(QUEUE))
    out = tmp_path / "out"
    slo = ["--slo", "p99_ttft_ms=11", "--tolerance", "0.1"]
    result = CliRunner().invoke(app, ["search", str(config), *slo, "--out", str(out)])
    assert result.exit_code == 0, result.output
    answer = json.loads((out / "search.json").read_text())
    assert f"{answer['rate']:.4g} requests/s keep p99_ttft_ms <= 11" in result.output
    assert answer["slo"] == {"p99_ttft_ms": 11.0}
    assert len((out / "summary.csv").read_text().splitlines()) > 3
    impossible = ["search", str(config), "--slo", "p99_ttft_ms=1", "--out", str(tmp_path / "no")]
    assert CliRunner().invoke(app, impossible).exit_code == 1
    assert CliRunner().invoke(app, ["search", str(config)]).exit_code == 2
