"""Cases of `simserve bench kernels`: names, lengths, counted work, and what is chosen."""

from __future__ import annotations

import pytest

from simserve.errors import SimserveError
from simserve.executor.real.bench.kernel_cases import (
    CASES,
    DEFAULT_WAYS,
    AttentionCase,
    choose_cases,
    choose_ways,
)
from simserve.executor.real.bench.kernel_report import KernelRow, kernel_cells, resource_cells
from simserve.report.markdown import markdown_table

LAUNCH = {
    "kernel": "_split_kernel",
    "tile": {"tile": 64, "rows": 16},
    "num_warps": 4,
    "num_stages": 3,
    "registers": 128,
    "spills": 0,
    "shared_bytes": 51200,
    "programs_per_sm": 4,
    "occupancy": 0.25,
}


def attention(name: str) -> AttentionCase:
    case = CASES[name]
    assert isinstance(case, AttentionCase)
    return case


def test_names_say_what_a_case_is() -> None:
    assert attention("decode b64 ctx2048").seqs == ((1, 2048),) * 64
    assert attention("decode b8 ctx8192 page64").block_size == 64
    assert attention("fp8 KV decode b64 ctx2048").kv_dtype == "float8_e4m3fn"
    assert attention("chunk 2048 @ 30720").seqs == ((2048, 32768),)
    assert attention("mixed 64 x ctx2048 + 1984 chunk @8192").seqs[-2:] == (
        (1, 2048),
        (1984, 10176),
    )
    assert all(name == case.name for name, case in CASES.items())


@pytest.mark.parametrize(
    ("name", "mean", "longest"),
    [
        ("decode b64 ragged mean 1507 max 11703", 1507, 11703),
        ("decode b256 ragged mean 1924 max 19786", 1924, 19786),
    ],
)
def test_ragged_lengths_are_those_of_the_name(name: str, mean: int, longest: int) -> None:
    lengths = [tokens for _, tokens in attention(name).seqs]
    assert sum(lengths) // len(lengths) == mean
    assert max(lengths) == longest


def test_work_is_counted() -> None:
    decode = attention("decode b64 ctx2048")
    assert decode.num_bytes == 64 * 2048 * 4096  # 8 heads of 128, K and V, 2 bytes
    assert decode.flops == 4 * 32 * 128 * 64 * 2048
    assert attention("fp8 KV decode b64 ctx2048").num_bytes == decode.num_bytes // 2
    assert attention("prefill 2048").flops == 4 * 32 * 128 * (2048 * 2049 // 2)
    assert CASES["kv_write 2048"].num_bytes == 2 * 2048 * 4096


def test_ways_follow_from_the_shape() -> None:
    assert attention("decode b1 ctx512").ways == ("auto", "v1", "v2", "article")
    assert attention("prefill 2048").ways == ("varlen",)
    assert attention("mixed 64 x ctx2048 + 1984 chunk @0").ways == ("varlen", "split")


def test_cases_are_chosen_by_name_or_pattern_in_their_own_order() -> None:
    names = [case.name for case in choose_cases(["kv_write 64", "decode b8 ctx*", "kv_write 64"])]
    assert names[0] == "decode b8 ctx512"
    assert names[-1] == "kv_write 64"
    assert len(names) == len(set(names)) == 6


def test_without_a_choice_the_largest_are_left_out() -> None:
    names = {case.name for case in choose_cases([])}
    assert "decode b256 ctx2048" in names
    assert "dense 8192 d128 bfloat16" in names
    assert "decode b256 ctx32768" not in names


def test_an_unknown_case_or_path_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(SimserveError, match=r"'decode b64 ctx204'.*mean 'decode b64 ctx2048'"):
        choose_cases(["decode b64 ctx204"])
    with pytest.raises(SimserveError, match=r"--paths: 'v3' is none of auto, v1, v2"):
        choose_ways(["v3"])
    assert choose_ways([]) == DEFAULT_WAYS
    assert choose_ways(["v2"]) == ("v2",)


def test_a_row_has_median_rates_and_shares() -> None:
    row = KernelRow(
        case="decode b1",
        path="auto",
        layout="nhd",
        kv_dtype="bfloat16",
        num_bytes=4_000_000,
        flops=100_000_000,
        samples_us=(12.0, 10.0, 2.0),
    ).as_json(read_gb_s=4000.0, matmul_tflop_s=500.0)
    assert (row["median_us"], row["gb_s"], row["percent_of_read_ceiling"]) == (10.0, 400.0, 10.0)
    assert (row["tflop_s"], row["percent_of_matmul"]) == (10.0, 2.0)
    assert row["samples_us"] == [12.0, 10.0, 2.0]
    write = KernelRow(
        case="w", path="", layout="", kv_dtype="", num_bytes=1000, samples_us=(1.0,)
    ).as_json(read_gb_s=4.0, matmul_tflop_s=1.0)
    assert "tflop_s" not in write


def test_tables_hold_what_was_measured_and_what_failed() -> None:
    measured = KernelRow(
        case="decode b1",
        path="auto",
        layout="nhd",
        kv_dtype="bfloat16",
        num_bytes=4_000_000,
        flops=100_000_000,
        samples_us=(10.0,),
    ).as_json(4000.0, 500.0)
    failed = KernelRow(
        case="decode b8", path="v1", layout="nhd", kv_dtype="bfloat16", failure="does not fit"
    ).as_json(4000.0, 500.0)
    rows = [{**measured, "kernels": [LAUNCH]}, failed]
    assert markdown_table(kernel_cells(rows))[2:] == [
        "| decode b1 | auto | nhd    | 10.0         |  400 |     10 |      10 |        2 |",
        "| decode b8 | v1   | nhd    | does not fit |      |        |         |          |",
    ]
    assert resource_cells(rows)[1:] == [
        ["decode b1", "auto", "nhd", "_split_kernel", "tile=64 rows=16", "4", "3", "128", "0",
         "50.0", "4", "25 %"],
    ]  # fmt: skip
