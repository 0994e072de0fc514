"""Whatever the bytes of a trace are, reading it gives requests or a TraceError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from simserve.errors import TraceError
from simserve.registry import BUILTINS
from simserve.types import TraceRequest
from simserve.workload.trace import open_trace

MOONCAKE = (
    b'{"timestamp": 0, "input_length": 1025, "output_length": 2, "hash_ids": [0, 1, 2]}\n'
    b'{"timestamp": 7, "input_length": 512, "output_length": 9, "hash_ids": [0], '
    b'"session_id": "s"}\n'
)
SEEDS: dict[str, bytes] = {
    "simserve": b'{"request_id": "a", "arrival_s": 0.5, "prompt": [["s", 4], [3, 9], [[1, 2], 2]], '
    b'"output_len": 2, "output": [["t", 2]], "class": "long", "priority": 1, "lora_id": 3}\n'
    b'{"request_id": "b", "arrival_s": 1, "prompt_len": 4, "output_len": 2, "parent": "a", '
    b'"think_time_s": 2.5, "mm_items": [{"identifier": "i", "offset": 0, "length": 3}]}\n',
    "mooncake": MOONCAKE,
    "timed_trace": MOONCAKE.replace(b"512", b"16").replace(b"1025", b"33"),
    "bailian": b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, '
    b'"output_length": 8, "type": "text", "turn": 1, "hash_ids": [10, 11]}\n'
    b'{"chat_id": 2, "parent_chat_id": 1, "timestamp": 0.75, "input_length": 16, '
    b'"output_length": 8, "type": "text", "turn": 2, "hash_ids": [10]}\n',
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    b'2023-11-16 18:15:46.68,"374",44\r\n',
    "burstgpt": b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n"
    b"19440110.0,s1,43,GPT-4,906,446\n19440109.0,,2,ChatGPT,36,9\n",
    "custom": b'{"prompt": "one two", "prompt_tokens": 3}\n{"prompt": "\\u00e9", '
    b'"output_tokens": 7}\n',
    "vidur": b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,14050,39\n0.5,100,1000\n",
    "llmservingsim": b'{"input_toks": 2, "output_toks": 1, "arrival_time_ns": 46926808, '
    b'"input_tok_ids": [1, 2], "output_tok_ids": [3]}\n{"session_id": "s", "arrival_time_ns": 9, '
    b'"sub_requests": [{"input_toks": 1, "output_toks": 1, "tool_duration_ns": 5}, '
    b'{"input_toks": 1, "output_toks": 1}]}\n',
    "dynamo": b'{"timestamp": 9, "event": {"schema": "dynamo.request.trace.v1", "event_type": '
    b'"request_end", "event_time_unix_ms": 99, "agent_context": {"session_id": "r"}, "request": '
    b'{"request_id": "a", "output_tokens": 3, "request_received_ms": 50, "replay": '
    b'{"trace_block_size": 16, "input_length": 15, "input_sequence_hashes": [1549729496]}}}}\n'
    b'{"timestamp": 9, "event": {"event_type": "tool_end"}}\n',
    "servegen": b"0,1.33,8.6,Weibull,0.375,0.4\r\n600,0,0,,0,0\r\n1200,0.273,6.0,Gamma,0.495,3\r\n",
}
DATASET = json.dumps({"0": {"input_tokens": "{224: 0.5, 225: 0.5}", "output_tokens": "{40: 1.0}"}})
WORDS = [b"NaN", b"1e400", b"null", b"-1", b"true", b"[]", b"{}", b"9" * 25, b'"', b",", b"\n"]
edits = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "repeat", "cut"]),
        st.integers(0, 10_000),
        st.one_of(st.binary(min_size=1, max_size=2), st.sampled_from(WORDS)),
    ),
    min_size=1,
    max_size=5,
)
Edits = list[tuple[str, int, bytes]]


def mutate(content: bytes, changes: Edits) -> bytes:
    for kind, place, data in changes:
        at = place % (len(content) + 1)
        if kind == "set":
            content = content[:at] + data + content[at + len(data) :]
        elif kind == "insert":
            content = content[:at] + data + content[at:]
        elif kind == "delete":
            content = content[:at] + content[at + len(data) * 3 :]
        elif kind == "repeat":
            content += content[at:]
        else:
            content = content[: max(at, 1)]
    return content


def outcome(path: Path, **options: Any) -> tuple[list[TraceRequest], str]:
    """The requests of a file, or the text of the one error that reading may end with."""
    try:
        return list(open_trace(path, **options).requests()), ""
    except TraceError as error:
        return [], str(error)


def read_both_ways(path: Path, name: str, **options: Any) -> None:
    for on_bad_row in ("error", "drop"):
        requests, error = outcome(path, format=name, on_bad_row=on_bad_row, **options)
        assert str(path.parent) in error or requests
        arrivals = [r.arrival_s for r in requests]
        assert arrivals == sorted(arrivals)
        assert arrivals[:1] in ([], [0.0])
        assert all(arrival < 2**60 for arrival in arrivals)
        assert all(r.prompt_len > 0 and r.output_len > 0 for r in requests)


def test_the_seeds_cover_every_reader_and_are_good(tmp_path: Path) -> None:
    assert set(SEEDS) == set(BUILTINS["readers"])
    (tmp_path / "dataset.json").write_text(DATASET)
    for name, content in SEEDS.items():
        path = tmp_path / "trace.csv"
        path.write_bytes(content)
        assert open_trace(path, format=name).num_requests >= 1


@pytest.mark.parametrize("name", SEEDS)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=edits)
@example(changes=[("insert", 0, b"\x1f\x8b")])
@example(changes=[("insert", 40, b'"')])
@example(changes=[("insert", 40, b"\x00")])
@example(changes=[("insert", 40, b"\r")])
def test_mutated_bytes_never_give_a_traceback(name: str, changes: Edits, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(DATASET)
    path = tmp_path / "trace.csv"
    path.write_bytes(mutate(SEEDS[name], changes))
    options = {"num_requests": 20} if name == "servegen" else {}
    read_both_ways(path, name, **options)
    requests, error = outcome(path)
    assert str(tmp_path) in error or requests


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=edits)
def test_mutated_histograms_never_give_a_traceback(changes: Edits, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_bytes(mutate(DATASET.encode(), changes))
    path = tmp_path / "trace.csv"
    path.write_bytes(SEEDS["servegen"])
    read_both_ways(path, "servegen", num_requests=20)
