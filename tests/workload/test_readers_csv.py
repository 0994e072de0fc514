"""CSV formats: columns by name, units, time stamps to the last digit, failed calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simserve.errors import TraceError
from simserve.workload.trace import open_trace

TraceFile = Callable[[str | bytes, str], Path]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


def arrivals(path: Path, **options: object) -> list[float]:
    return [r.arrival_s for r in open_trace(path, **options).requests()]  # type: ignore[arg-type]


def lengths(path: Path, **options: object) -> list[tuple[int, int]]:
    trace = open_trace(path, **options)  # type: ignore[arg-type]
    return [(r.prompt_len, r.output_len) for r in trace.requests()]


def test_azure_keeps_100_ns_crlf_and_the_last_row_without_newline(trace_file: TraceFile) -> None:
    path = trace_file(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 18:15:46.6805900,374,44\r\n"
        b"2023-11-16 18:15:46.6805901,374,44\r\n"
        b"2023-11-16 18:15:47.0000000,1,1",
        "azure.csv",
    )
    assert arrivals(path) == [0.0, 1e-7, 0.31941]
    assert lengths(path)[-1] == (1, 1)


def test_azure_mixed_fractions_offsets_and_a_byte_order_mark(trace_file: TraceFile) -> None:
    path = trace_file(
        b"\xef\xbb\xbf" + AZURE.encode() + b"2024-05-10 00:00:00.500000+00:00,10,5\n"
        b"2024-05-10 00:00:01+00:00,20,5\n"
        b"2024-05-10 02:00:02.000000+02:00,30,5\n"
        b"2024-05-09 19:00:03.25-0500,40,5\n",
        "azure.csv",
    )
    assert arrivals(path) == [0.0, 0.5, 1.5, 2.75]


def test_azure_2025_has_a_column_in_between(trace_file: TraceFile) -> None:
    path = trace_file(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2024-10-15T12:00:00.269Z,0,770,491\n"
        "2024-10-15T12:00:05.819Z,16,949,126\n",
        "azure.csv",
    )
    assert arrivals(path) == [0.0, 5.55]
    assert lengths(path) == [(770, 491), (949, 126)]


@pytest.fixture
def berlin() -> Iterator[None]:
    """A machine in a time zone that skips the hour from 02:00 on 2024-03-31."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Europe/Berlin"
    time.tzset()
    yield
    os.environ.pop("TZ")
    if before is not None:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize("offset", ["", "+00:00"])
def test_azure_stamps_never_go_through_local_time(trace_file: TraceFile, offset: str) -> None:
    stamps = (f"2024-03-31 01:59:59{offset},10,5\n", f"2024-03-31 03:00:01{offset},10,5\n")
    assert arrivals(trace_file(AZURE + "".join(stamps), "azure.csv")) == [0.0, 3602.0]


@pytest.mark.parametrize(
    "stamp",
    [
        "2024-02-30 00:00:00",
        "2024-01-01 24:00:00",
        "2024-01-01 00:00:60",
        "2024-01-01 00:00:00.12345678",
        "2024-01-01",
        "1704067200",
        "",
        "9999-99-99 00:00:00",
    ],
)
def test_azure_refuses_what_is_no_stamp(trace_file: TraceFile, stamp: str) -> None:
    path = trace_file(f"{AZURE}2024-01-01 00:00:00,1,1\n{stamp},1,1\n", "azure.csv")
    with pytest.raises(TraceError, match=r"azure\.csv:3: TIMESTAMP: "):
        open_trace(path).requests()


def test_azure_refuses_to_mix_stamps_with_and_without_offset(trace_file: TraceFile) -> None:
    rows = "2024-01-01 00:00:00,1,1\n2024-01-01 00:00:01Z,1,1\n"
    with pytest.raises(TraceError, match=r":3: TIMESTAMP: has an UTC offset, but earlier rows"):
        open_trace(trace_file(AZURE + rows, "azure.csv")).requests()


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        ("0", "is 0: a request needs at least one prompt token"),
        ("-5", "must not be negative"),
        ("16.5", "not a whole number"),
        ("1e3", "not a whole number"),
        ("1_000", "not a whole number"),
        ("１２", "not a whole number"),
        ("nan", "not a whole number"),
        ("true", "not a whole number"),
        ("", "is empty"),
        ("99999999999", "is more than"),
        ("9" * 5000, "not a whole number"),
    ],
)
def test_csv_refuses_what_is_no_count(trace_file: TraceFile, tokens: str, what: str) -> None:
    path = trace_file(f"{AZURE}2024-01-01 00:00:00,{tokens},1\n", "azure.csv")
    with pytest.raises(TraceError, match=rf"azure\.csv:2: ContextTokens: .*{what}"):
        open_trace(path).requests()


def test_csv_numbers_may_have_blanks_around_them(trace_file: TraceFile) -> None:
    path = trace_file("TIMESTAMP, ContextTokens ,GeneratedTokens\n2024-01-01 00:00:00, 7 ,1\n", "a")
    assert lengths(path) == [(7, 1)]


def test_csv_rows_of_another_width_and_missing_columns_are_named(trace_file: TraceFile) -> None:
    short = trace_file(AZURE + "2024-01-01 00:00:00,1\n", "short.csv")
    with pytest.raises(TraceError, match=r"short\.csv:2: row: has 2 fields, the header has 3"):
        open_trace(short).requests()
    header = trace_file(
        "TIMESTAMP,ContextToken,GeneratedTokens\n2024-01-01 00:00:00,1,1\n", "h.csv"
    )
    with pytest.raises(TraceError, match=r"ContextTokens: no such column \(did you mean 'Context"):
        open_trace(header, format="azure").requests()
    twice = trace_file("TIMESTAMP,ContextTokens,GeneratedTokens,TIMESTAMP\n1,1,1,1\n", "t.csv")
    with pytest.raises(TraceError, match="the header has this column twice"):
        open_trace(twice).requests()


def test_burstgpt_by_name_failed_calls_dropped_and_sorted(trace_file: TraceFile) -> None:
    """The origin is the earliest arrival that is kept, wherever it stands."""
    path = trace_file(
        BURST_3 + "19440110.0,s1,43,GPT-4,906,446,1352,Conversation log\n"
        "19440100.0,,0,ChatGPT,0,0,0,API log\n"
        "19440111.0,s1,2,ChatGPT,36,0,36,Conversation log\n"
        "19440109.0,s2,3,ChatGPT,50,20,70,Conversation log\n"
        "19440109.5,,3,ChatGPT,51,21,72,API log\n",
        "burst.csv",
    )
    trace = open_trace(path, on_bad_row="drop")
    got = [(r.arrival_s, r.session, r.prompt_len, r.request_id) for r in trace.requests()]
    assert got == [(0.0, "s2", 50, "r5"), (0.5, None, 51, "r6"), (1.0, "s1", 906, "r2")]
    assert trace.report.dropped == {"zero_prompt": 1, "zero_output": 1}
    assert trace.report.dropped_rows == {"zero_prompt": (3,), "zero_output": (4,)}
    assert trace.report.num_rows == 5


def test_burstgpt_failed_calls_as_errors_say_how_to_drop_them(trace_file: TraceFile) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path = trace_file(header + "5,ChatGPT,0,0,0,API log\n", "burst.csv")
    with pytest.raises(TraceError, match=r"burst\.csv:2: Request tokens: .*on_bad_row: drop"):
        open_trace(path).requests()


@pytest.mark.parametrize("stamp", ["nan", "inf", "-1", "1e400", "x", "", "1e17"])
def test_burstgpt_refuses_what_is_no_time(trace_file: TraceFile, stamp: str) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path = trace_file(f"{header}{stamp},ChatGPT,1,1,2,API log\n", "burst.csv")
    with pytest.raises(TraceError, match=r"burst\.csv:2: Timestamp: "):
        open_trace(path).requests()


def test_vidur_with_and_without_arrivals(trace_file: TraceFile) -> None:
    timed = trace_file("arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,9,3\n3,1,1\n", "t.csv")
    assert arrivals(timed) == [0.0, 0.5]
    with pytest.raises(TraceError, match="arrivals of its own"):
        open_trace(timed, interval_s=1.0).requests()
    untimed = trace_file("num_prefill_tokens,num_decode_tokens,pd_ratio\n9,3,3\n9,3,3\n", "u.csv")
    with pytest.raises(TraceError, match=r"arrived_at: no such column.*option interval_s"):
        open_trace(untimed).requests()
    assert arrivals(untimed, interval_s=0.25) == [0.0, 0.25]  # equal rows are two requests


def test_traces_without_prefix_information_share_nothing(trace_file: TraceFile) -> None:
    rows = "2024-01-01 00:00:00,64,4\n2024-01-01 00:00:01,64,4\n"
    first, second = open_trace(trace_file(AZURE + rows, "azure.csv")).requests()
    assert {s for s, _ in first.prompt}.isdisjoint({s for s, _ in second.prompt})
