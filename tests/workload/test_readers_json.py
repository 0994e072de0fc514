"""JSON-lines formats: units, block ids, token ids, sessions, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simserve.errors import TraceError
from simserve.types import TraceRequest
from simserve.workload.trace import open_trace

TraceFile = Callable[..., Path]


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def mooncake(
    timestamp: float, input_length: int, ids: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    row = {"timestamp": timestamp, "input_length": input_length, "output_length": 2, **more}
    return row if ids is None else row | {"hash_ids": ids}


def read(path: Path, **options: Any) -> list[TraceRequest]:
    return list(open_trace(path, **options).requests())


def bailian(chat: int, parent: int, timestamp: float, ids: list[int]) -> dict[str, Any]:
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": 16 * len(ids),
        "output_length": 8,
        "type": "text",
        "turn": 1 if parent == -1 else 2,
        "hash_ids": ids,
    }


class TestMooncake:
    def test_milliseconds_and_512_token_blocks_with_private_tails(
        self, trace_file: TraceFile
    ) -> None:
        path = trace_file(
            lines(mooncake(1_178_625, 1025, [0, 1, 2]), mooncake(1_181_625, 512, [0]))
        )
        first, second = read(path)
        assert (first.arrival_s, second.arrival_s) == (0.0, 3.0)
        assert first.prompt == ((0, 512), (1, 512), ("r1/tail", 1))
        assert second.prompt == ((0, 512),)

    def test_ids_of_any_size_stay_apart(self, trace_file: TraceFile) -> None:
        ids = [7, 2**32 + 7, 18435288317095910706, 18435288317095910707, 2**70]
        path = trace_file(lines(*(mooncake(0, 512, [i]) for i in ids)))
        assert [r.prompt for r in read(path)] == [((i, 512),) for i in ids]

    def test_wrong_block_size_is_named_with_the_row(self, trace_file: TraceFile) -> None:
        path = trace_file(lines(mooncake(0, 20, [0, 1])))
        with pytest.raises(TraceError, match=r"jsonl:1: hash_ids: has 2 ids.*block_size 512"):
            open_trace(path).requests()
        assert read(path, block_size=16)[0].prompt == ((0, 16), ("r1/tail", 4))

    @pytest.mark.parametrize(
        ("lengths", "what"),
        [((700, 1024), "full block, but row 1 as a partial"), ((1024, 700), "partial block, but")],
    )
    def test_an_id_is_not_partial_and_full(
        self, trace_file: TraceFile, lengths: tuple[int, int], what: str
    ) -> None:
        path = trace_file(lines(*(mooncake(0, length, [0, 3]) for length in lengths)))
        with pytest.raises(TraceError, match=rf"jsonl:2: hash_ids: uses id 3 as a {what}"):
            open_trace(path).requests()
        assert [r.prompt_len for r in read(path, on_bad_row="drop")] == [lengths[0]]

    def test_without_ids_nothing_is_shared(self, trace_file: TraceFile) -> None:
        trace = open_trace(trace_file(lines(mooncake(0, 600), mooncake(0, 600))))
        assert [r.prompt for r in trace.requests()] == [
            (("r1/prompt", 600),),
            (("r2/prompt", 600),),
        ]
        assert "no hash_ids: the prompt shares nothing (2 rows)" in trace.report.warnings

    def test_bad_values_are_each_refused_with_their_row(self, trace_file: TraceFile) -> None:
        rows = [
            '{"timestamp": null, "input_length": 16, "output_length": 2}',
            '{"timestamp": NaN, "input_length": 16, "output_length": 2}',
            '{"timestamp": -1, "input_length": 16, "output_length": 2}',
            '{"timestamp": 1e400, "input_length": 16, "output_length": 2}',
            '{"timestamp": "100", "input_length": 16, "output_length": 2}',
            '{"timestamp": 5, "input_length": 16.5, "output_length": 2}',
            '{"timestamp": 5, "input_length": true, "output_length": 2}',
            "",
            '{"timestamp": 5, "input_length": 16, "output_length": 2, "input_lenght": 3}',
            '{"timestamp": 5, "input_length": 16}',
            '{"timestamp": 5, "input_length": 16, "output_length": 0}',
            '{"timestamp": 5, "input_length": 16, "output_length": 1' + "0" * 400 + "}",
            '{"timestamp": 1' + "0" * 400 + ', "input_length": 16, "output_length": 1}',
            '{"timestamp": 5, "input_length": 16, "output_length": 1' + "0" * 5000 + "}",
            '{"timestamp": 5, "input_length": 16, "output_length": 2, "hash_ids": [1.0]}',
            '{"timestamp": 5, "input_length": 16, "output_length": 2, "hash_ids": [true]}',
            '{"timestamp": 5, "input_length": 16, "output_length": 2, "hash_ids": [-1]}',
            '{"timestamp": 5, "input_length": 16, "output_length": 2, "hash_ids": "1"}',
            '{"timestamp": 5, "input_length": 16, "output_length": 2',
            "[1, 2, 3]",
            "[" * 100_000,
            '{"timestamp": 7, "input_length": 16, "output_length": 2}',
        ]
        trace = open_trace(trace_file("\n".join(rows)), on_bad_row="drop")
        assert [r.request_id for r in trace.requests()] == ["r22"]
        refused = sorted(row for rows in trace.report.dropped_rows.values() for row in rows)
        assert refused == [number for number in range(1, 22) if number != 8]
        assert trace.report.num_rows == 21
        assert trace.report.dropped_rows["unknown_key"] == (9,)
        assert trace.report.dropped["broken_json"] == 4

    def test_a_key_that_stands_twice_is_refused(self, trace_file: TraceFile) -> None:
        twice = '{"timestamp": 5, "input_length": 16, "output_length": 2, "output_length": 3}'
        with pytest.raises(TraceError, match=r":1: output_length: stands there twice"):
            open_trace(trace_file(twice)).requests()
        trace = open_trace(trace_file(twice + "\n" + lines(mooncake(0, 16))), on_bad_row="drop")
        assert len(list(trace.requests())) == 1
        assert trace.report.dropped["duplicate_key"] == 1

    @pytest.mark.parametrize(
        ("twice", "name"),
        [
            ('{"a": {"b": 1, "c": [{"d": 1}, {"d": 1, "d": 2}], "e": 3}}', "a.c.1.d"),
            ('{"a": {"b": 1}, "c": {"a": 1, "b": 2, "a": 3}}', "c.a"),
            ('{"a": {"b": 1, "b": 2}, "a"', "row"),  # broken behind it
        ],
    )
    def test_a_key_within_others_is_named_with_them(
        self, twice: str, name: str, trace_file: TraceFile
    ) -> None:
        trace = open_trace(trace_file(lines(mooncake(0, 16)) + twice))
        with pytest.raises(TraceError, match=rf":2: {name}: (stands there twice|is broken JSON)"):
            trace.requests()

    def test_a_misspelt_key_is_refused_and_a_foreign_one_told(self, trace_file: TraceFile) -> None:
        with pytest.raises(TraceError, match=r"input_lenght: unknown key \(did you mean 'input_l"):
            open_trace(trace_file(lines(mooncake(0, 16, input_lenght=3)))).requests()
        trace = open_trace(trace_file(lines(mooncake(0, 16, region="eu"))))
        assert "unknown key 'region' ignored (1 rows)" in trace.report.warnings

    def test_a_delay_makes_a_turn_of_a_session(self, trace_file: TraceFile) -> None:
        turn = {"session_id": "s", "delay": 250, "input_length": 9, "output_length": 1}
        first, second = read(trace_file(lines(mooncake(3, 5, session_id="s"), turn)))
        assert (first.session, first.turn, first.parent) == ("s", 0, None)
        assert (second.turn, second.parent, second.think_time_s) == (1, "r1", 0.25)
        orphan = trace_file(lines(turn))
        with pytest.raises(TraceError, match="timestamp: is missing"):
            open_trace(orphan).requests()

    def test_a_turn_with_a_time_and_a_delay_is_refused(self, trace_file: TraceFile) -> None:
        """It would start at its time, whatever became of the turn before it."""
        first = mooncake(3, 5, session_id="s")
        both = trace_file(lines(first, mooncake(9, 5, session_id="s", delay=250)))
        with pytest.raises(TraceError, match=r":2: delay: stands beside timestamp: a"):
            open_trace(both).requests()
        null = trace_file(lines(first, mooncake(9, 5, session_id="s", delay=None)))
        assert [r.parent for r in read(null)] == [None, None]


class TestTimedTrace:
    def test_seconds_and_16_token_blocks_by_name(self, trace_file: TraceFile) -> None:
        path = trace_file(lines(mooncake(12.5, 20, [9, 8]), mooncake(13, 16, [9])))
        assert open_trace(path).format == "mooncake"
        first, second = read(path, format="timed_trace")
        assert (first.arrival_s, second.arrival_s) == (0.0, 0.5)
        assert first.prompt == ((9, 16), ("r1/tail", 4))

    def test_reads_mooncake_like_the_mooncake_reader(self, trace_file: TraceFile) -> None:
        path = trace_file(lines(*(mooncake(7 * i, 513, [i, 99]) for i in range(50))))
        options = {"block_size": 512, "sec_multiplier": 0.001}
        assert read(path, format="timed_trace", **options) == read(path)


class TestBailian:
    def test_seconds_blocks_and_sessions(self, trace_file: TraceFile) -> None:
        rows = [bailian(1, -1, 0.5, [10, 11]), bailian(2, 1, 1.25, [10, 11, 13])]
        trace = open_trace(trace_file(lines(*rows, bailian(7, 2, 9.0, [10]))))
        assert trace.format == "bailian"
        got = list(trace.requests())
        assert [(r.request_id, r.session, r.turn, r.arrival_s) for r in got] == [
            ("1", "1", 1, 0.0),
            ("2", "1", 2, 0.75),
            ("7", "1", 2, 8.5),
        ]
        assert got[1].prompt == ((10, 16), (11, 16), (13, 16))
        assert all(r.parent is None for r in got)

    def test_orphans_and_children_before_their_parents(self, trace_file: TraceFile) -> None:
        rows = [
            bailian(1, -1, 0.5, [10]),
            bailian(2, 1, 0.25, [10]),
            bailian(3, 99, 1.0, [10]),
            bailian(1, -1, 2.0, [11]),
        ]
        path = trace_file(lines(*rows))
        with pytest.raises(TraceError, match=r"jsonl:2: timestamp: is 0\.25, earlier than 0\.5"):
            open_trace(path).requests()
        report = open_trace(path, on_bad_row="drop").report
        assert report.dropped_rows == {
            "child_before_parent": (2,),
            "orphan": (3,),
            "duplicate_id": (4,),
        }


class TestCustom:
    def test_equal_texts_are_equal_segments_of_estimated_length(
        self, trace_file: TraceFile
    ) -> None:
        path = trace_file(
            lines(
                {"prompt": "one two three"},
                {"prompt": "one two three", "prompt_tokens": 5, "output_tokens": 7},
                {"prompt": "one two four"},
            )
        )
        trace = open_trace(path, words_to_tokens=1.5)
        a, b, c = trace.requests()
        assert (a.prompt_len, b.prompt_len, c.prompt_len) == (5, 5, 5)
        assert (a.output_len, b.output_len) == (256, 7)
        assert a.prompt == b.prompt
        assert a.prompt[0][0] != c.prompt[0][0]
        estimate = "no prompt_tokens: the prompt's length is an estimate, words x 1.5 (2 rows)"
        assert estimate in trace.report.warnings

    def test_arrivals_are_spaced_by_an_option(self, trace_file: TraceFile) -> None:
        path = trace_file(lines(*({"prompt": "x"} for _ in range(3))))
        assert [r.arrival_s for r in read(path)] == [0.0, 0.0, 0.0]
        assert [r.arrival_s for r in read(path, interval_s=0.5)] == [0.0, 0.5, 1.0]

    @pytest.mark.parametrize("prompt", ['""', '"  "', "null", "7", '["a"]'])
    def test_refuses_what_is_no_text(self, trace_file: TraceFile, prompt: str) -> None:
        path = trace_file(f'{{"prompt": {prompt}}}')
        with pytest.raises(TraceError, match=r"jsonl:1: prompt: "):
            open_trace(path, format="custom").requests()


class TestLlmServingSim:
    def test_nanoseconds_and_literal_token_ids(self, trace_file: TraceFile) -> None:
        row = {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 10**18 + 46_926_808}
        later = row | {"arrival_time_ns": 10**18 + 46_926_809}
        ids = {"input_tok_ids": [5, 6, 7], "output_tok_ids": [8, 9]}
        trace = open_trace(trace_file(lines(row | ids, later)))
        first, second = trace.requests()
        assert trace.format == "llmservingsim"
        assert first.prompt == (((5, 6, 7), 3),)
        assert first.output == (((8, 9), 2),)
        assert second.arrival_s == 1e-9
        assert second.output is None

    @pytest.mark.parametrize("ids", [[1, 2], [1, 2, -3], [1, 2, 3.0], "abc"])
    def test_ids_that_do_not_fit_are_refused(self, trace_file: TraceFile, ids: Any) -> None:
        row = {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 1, "input_tok_ids": ids}
        with pytest.raises(TraceError, match=r"jsonl:1: input_tok_ids: "):
            open_trace(trace_file(lines(row))).requests()

    def test_agentic_calls_wait_for_each_other(self, trace_file: TraceFile) -> None:
        calls = [
            {"input_toks": 10, "output_toks": 3, "tool_duration_ns": 127_000_000},
            {"input_toks": 20, "output_toks": 4, "tool_duration_ns": 0},
        ]
        session = {"session_id": "task", "arrival_time_ns": 4_000_000, "sub_requests": calls}
        flat = {"input_toks": 1, "output_toks": 1, "arrival_time_ns": 5_000_000}
        a, b, c = read(trace_file(lines(session, flat)))
        assert [(r.request_id, r.session, r.turn) for r in (a, b)] == [
            ("task/0", "task", 0),
            ("task/1", "task", 1),
        ]
        assert (a.parent, b.parent, b.think_time_s) == (None, "task/0", 0.127)
        assert c.arrival_s == 0.001
        assert {s for s, _ in a.prompt}.isdisjoint({s for s, _ in b.prompt})

    def test_measured_runs_have_one_origin_and_one_clock(self, trace_file: TraceFile) -> None:
        """Epoch arrivals and monotonic stamps stand in one row; only the first make arrivals."""
        row = {
            "request_id": "bench-0",
            "input_toks": 3,
            "output_toks": 2,
            "arrival_time": 1787267980.0,
            "queued_ts": 27536.66,
            "first_token_ts": 27537.35,
        }
        later = row | {"request_id": "bench-1", "arrival_time": 1787267980.5, "queued_ts": 27530.0}
        assert [r.arrival_s for r in read(trace_file(lines(row, later)))] == [0.0, 0.5]
        other = {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 5}
        with pytest.raises(TraceError, match=r"jsonl:2: arrival_time_ns: is another clock than"):
            open_trace(trace_file(lines(row, other))).requests()
        with pytest.raises(TraceError, match=r"jsonl:2: request_id: 'bench-0' occurs twice"):
            open_trace(trace_file(lines(row, row))).requests()


def dynamo(
    name: str, received: int, end: int, ids: list[int], session: str, parent: str | None = None
) -> dict[str, Any]:
    context = {"session_id": session} | ({"parent_session_id": parent} if parent else {})
    replay = {"trace_block_size": 16, "input_length": 16 * len(ids) - 3}
    request = {
        "request_id": name,
        "output_tokens": 4,
        "request_received_ms": received,
        "replay": replay | {"input_sequence_hashes": ids},
    }
    event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end"}
    more = {"event_time_unix_ms": end, "agent_context": context, "request": request}
    return {"timestamp": end, "event": event | more}


class TestDynamo:
    EVENTS = (
        dynamo("a", 1_779_163_048_815, 1_779_163_050_000, [18435288317095910706, 1], "root"),
        {"timestamp": 1, "event": {"schema": "dynamo.request.trace.v1", "event_type": "tool_end"}},
        dynamo("c", 1_779_163_051_500, 1_779_163_052_000, [3], "sub", "root"),
        dynamo("b", 1_779_163_050_250, 1_779_163_053_000, [18435288317095910706, 2], "root"),
        dynamo("d", 1_779_163_052_125, 1_779_163_054_000, [5, 4], "sub", "root"),
    )

    def test_completion_order_is_not_arrival_order(self, trace_file: TraceFile) -> None:
        trace = open_trace(trace_file(lines(*self.EVENTS)))
        got = list(trace.requests())
        assert trace.format == "dynamo"
        assert [(r.request_id, r.arrival_s) for r in got] == [
            ("a", 0.0),
            ("b", 1.435),
            ("c", 2.685),
            ("d", 3.31),
        ]
        assert got[0].prompt == ((18435288317095910706, 16), ("a/tail", 13))
        assert all(r.parent is None for r in got)
        assert trace.report.num_backward_steps == 1
        assert "event 'tool_end' passed over (1 rows)" in trace.report.warnings

    def test_a_bare_event_is_an_event_too(self, trace_file: TraceFile) -> None:
        bare = [row["event"] for row in self.EVENTS]
        path, wrapped = trace_file(lines(*bare), "b.jsonl"), trace_file(lines(*self.EVENTS))
        assert read(path) == read(wrapped)

    def test_closed_loop_goes_by_ends_whatever_their_order_in_the_file(
        self, trace_file: TraceFile
    ) -> None:
        ends = {"late": 3000, "one": 1000, "other": 1000, "early": 500}
        events = [dynamo(name, 0, end, [n], "s") for n, (name, end) in enumerate(ends.items())]
        asks = [dynamo(f"at {ms}", ms, 9000 + ms, [9], "s") for ms in (499, 999, 1000, 2999, 3001)]
        got = read(trace_file(lines(*events, *asks)), closed_loop=True)
        parents = [None, "early", "one", "one", "late"]
        assert [r.parent for r in got if r.request_id.startswith("at")] == parents

    def test_closed_loop_waits_for_what_had_ended(self, trace_file: TraceFile) -> None:
        got = read(trace_file(lines(*self.EVENTS)), closed_loop=True)
        assert [(r.request_id, r.parent, r.think_time_s) for r in got] == [
            ("a", None, 0.0),
            ("b", "a", 0.25),
            ("c", "a", 1.5),
            ("d", "c", 0.125),
        ]

    def test_one_block_size_a_file(self, trace_file: TraceFile) -> None:
        other = json.loads(json.dumps(self.EVENTS[2]))
        other["event"]["request"]["replay"] |= {"trace_block_size": 64}
        with pytest.raises(TraceError, match=r"jsonl:2: trace_block_size: is 64, but 16"):
            open_trace(trace_file(lines(self.EVENTS[0], other))).requests()
