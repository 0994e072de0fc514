"""Two runs side by side: which numbers, their errors, and what is left out."""

from __future__ import annotations

import pytest

import simserve
from simserve.fidelity.validate.percentile_table import percentile_cells, percentile_rows


def small_run(base_s: float) -> simserve.RunResult:
    return simserve.run(
        {
            "model": "llama-3.1-8b",
            "workload": {
                "synthetic": {
                    "num_requests": 4,
                    "prompt_len": {"kind": "constant", "value": 40},
                    "output_len": {"kind": "constant", "value": 3},
                }
            },
            "executor": {"cost": {"kind": "formula", "base_s": base_s}},
        }
    )


def test_errors_are_relative_to_the_real_run() -> None:
    rows = {row.key: row for row in percentile_rows({"p50_ttft_ms": 8.0}, {"p50_ttft_ms": 10.0})}
    assert rows["p50_ttft_ms"].error == 0.25
    assert rows["p50_ttft_ms"].as_json() == {
        "key": "p50_ttft_ms",
        "name": "TTFT p50 (ms)",
        "real": 8.0,
        "simulated": 10.0,
        "error": 0.25,
    }
    assert list(rows) == ["p50_ttft_ms"]


@pytest.mark.parametrize(("real", "simulated"), [(None, 1.0), (1.0, None), (0.0, 1.0)])
def test_what_cannot_be_compared_has_no_error(real: float | None, simulated: float | None) -> None:
    (row,) = percentile_rows({"p99_itl_ms": real}, {"p99_itl_ms": simulated})
    assert row.error is None
    assert percentile_cells([row])[1][-1] == "–"


def test_the_table_has_latencies_then_rates() -> None:
    real = {"p50_itl_ms": 100.0, "p95_itl_ms": 1234.56, "request_throughput": 2.0}
    rows = percentile_rows(
        real, {"p50_itl_ms": 99.5, "p95_itl_ms": 1300.0, "request_throughput": 2.0}
    )
    assert percentile_cells(rows) == [
        ["", "real", "simulated", "error"],
        ["ITL p50 (ms)", "100.0", "99.50", "−0.5 %"],
        ["ITL p95 (ms)", "1,234.6", "1,300.0", "+5.3 %"],
        ["request throughput (requests/s)", "2.00", "2.00", "+0.0 %"],
    ]


def test_all_numbers_of_two_runs_are_compared() -> None:
    slow, fast = small_run(0.2), small_run(0.1)
    rows = percentile_rows(slow.summary_dict, fast.summary_dict)
    assert {row.error for row in rows if row.key.endswith("itl_ms")} == {-0.5}
    assert [row.key for row in rows] == [
        *(f"{p}_{m}_ms" for m in ("ttft", "itl", "e2el") for p in ("p50", "p95", "p99")),
        "request_throughput",
        "output_throughput",
    ]
