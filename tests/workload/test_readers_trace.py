"""Traces: sniffing, options, one origin, stable order, reports, and reading twice."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simserve import run
from simserve.config.build_workload import trace_of
from simserve.config.loader import load_config
from simserve.errors import ConfigError, PluginError, TraceError, UnknownNameError
from simserve.registry import BUILTINS, resolve
from simserve.segments import tokens
from simserve.types import TraceRequest
from simserve.workload.readers.base import Reader
from simserve.workload.rows import RowLog
from simserve.workload.sniff import sniff
from simserve.workload.trace import open_trace

TraceFile = Callable[..., Path]

HEADS = {
    "simserve": '{"arrival_s": 0, "prompt_len": 4, "output_len": 1}\n',
    "mooncake": '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [0]}\n',
    "bailian": '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 4, '
    '"output_length": 8, "type": "text", "turn": 1, "hash_ids": [1]}\n',
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,4,1\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,4,1,5,API log\n",
    "custom": '{"prompt": "a b c"}\n',
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0,4,1\n",
    "llmservingsim": '{"input_toks": 4, "output_toks": 1, "arrival_time_ns": 9}\n',
    "dynamo": '{"timestamp": 1, "event": {"schema": "dynamo.request.trace.v1", "event_type": '
    '"request_end", "event_time_unix_ms": 9, "request": {"request_id": "a", "input_tokens": 4, '
    '"output_tokens": 1, "request_received_ms": 5}}}\n',
    "servegen": "0,1,1,Gamma,1,1\n",
}


def native(*arrivals_s: float, **more: Any) -> str:
    rows = ({"arrival_s": a, "prompt_len": 8, "output_len": 1, **more} for a in arrivals_s)
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("parent", [None, "a"], ids=["open_loop", "closed_loop"])
def test_an_arrival_too_late_for_a_clock_names_its_row(
    trace_file: TraceFile, parent: str | None
) -> None:
    ids = ({"request_id": "a"}, {"request_id": "b", "parent": parent}, {"request_id": "c"})
    rows = "".join(native(at, **one) for at, one in zip((5, 6, 2e12), ids, strict=True))
    trace = {"path": str(trace_file(rows))}
    where = rf"^{trace['path']}:3: request 'c': arrival_s: must be from 0 to 1e\+12 seconds, got"
    with pytest.raises(TraceError, match=where):
        run({"model": "llama-3.1-8b", "workload": {"trace": trace}})
    rescaled = {**trace, "speedup": 1e9}
    summary = run({"model": "llama-3.1-8b", "workload": {"trace": rescaled}}).summary_dict
    assert summary["completed"] == 3


class TestSniff:
    @pytest.mark.parametrize("name", HEADS)
    def test_knows_every_format(self, trace_file: TraceFile, name: str) -> None:
        assert sniff(trace_file(HEADS[name])) == name
        assert sniff(trace_file(gzip.compress(HEADS[name].encode()))) == name
        assert sniff(trace_file(b"\xef\xbb\xbf\n" + HEADS[name].encode())) == name

    def test_every_reader_is_sniffed_or_goes_by_name(self) -> None:
        assert set(HEADS) | {"timed_trace"} == set(BUILTINS["readers"])

    def test_each_format_is_claimed_by_one_reader(self, trace_file: TraceFile) -> None:
        """But Bailian rows, which have all of Mooncake's columns."""
        for name, head in HEADS.items():
            path = trace_file(head)
            claims = [r for r in BUILTINS["readers"] if resolve("readers", r)().sniff(path, head)]
            assert claims in ([name], ["mooncake", name] if name == "bailian" else [name])

    def test_a_broken_first_row_does_not_hide_the_format(self, trace_file: TraceFile) -> None:
        path = trace_file('{"timestamp": 0, "input\n' + HEADS["mooncake"])
        assert sniff(path) == "mooncake"

    @pytest.mark.parametrize("zipped", [False, True])
    def test_a_long_first_row_does_not_hide_the_format(
        self, trace_file: TraceFile, zipped: bool
    ) -> None:
        row = {"prompt": [[list(range(40_000)), 40_000]], "arrival_s": 0, "output_len": 1}
        content = json.dumps(row).encode()
        assert sniff(trace_file(gzip.compress(content) if zipped else content)) == "simserve"

    def test_a_row_ends_with_a_line_feed_alone(self, trace_file: TraceFile) -> None:
        text = "one\u2028two\u0085three"
        path = trace_file(json.dumps({"prompt": text}, ensure_ascii=False))
        assert open_trace(path).num_requests == 1

    def test_rows_that_are_almost_of_our_own_format_are_told_what_they_lack(
        self, trace_file: TraceFile
    ) -> None:
        path = trace_file('{"arrival": 0, "input_len": 5, "output_len": 3}\n')
        with pytest.raises(TraceError, match=r"output_len; these lack arrival_s and prompt_len$"):
            sniff(path)

    def test_what_is_unknown_is_shown_with_the_known(self, trace_file: TraceFile) -> None:
        path = trace_file("t,prompt_throughput\n1.0,3392.0\n")
        with pytest.raises(
            TraceError, match=r"begins like this: 't,prompt_thr.*simserve, mooncake"
        ):
            sniff(path)

    @pytest.mark.parametrize("content", ["", "\n\n", "  "])
    def test_empty_files(self, trace_file: TraceFile, content: str) -> None:
        with pytest.raises(TraceError, match="no requests: the file is empty"):
            open_trace(trace_file(content))

    def test_imports_only_what_it_tries(self, trace_file: TraceFile, repo_root: Path) -> None:
        import subprocess

        code = (
            "import sys; from simserve.workload.sniff import sniff; sniff(sys.argv[1]); "
            "print([m for m in sys.modules if '.readers.' in m])"
        )
        path = trace_file(HEADS["bailian"])
        command = [sys.executable, "-c", code, str(path)]
        environment = {**os.environ, "PYTHONPATH": str(repo_root)}
        outcome = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert "bailian" in outcome.stdout, outcome.stderr
        assert "azure" not in outcome.stdout
        assert "servegen" not in outcome.stdout


class TestOptions:
    def test_unknown_ones_are_answered_with_the_known(self, trace_file: TraceFile) -> None:
        path = trace_file(HEADS["mooncake"])
        with pytest.raises(ConfigError, match=r"no option 'blocksize' \(did you mean 'block_size'"):
            open_trace(path, blocksize=16)
        with pytest.raises(ConfigError, match="its options: none"):
            open_trace(trace_file(HEADS["azure"]), block_size=16)

    @pytest.mark.parametrize("value", [0, -1, 16.0, "16", True, None])
    def test_wrong_values(self, trace_file: TraceFile, value: object) -> None:
        path = trace_file(HEADS["mooncake"])
        with pytest.raises(ConfigError, match="option 'block_size' of trace format 'mooncake' is"):
            open_trace(path, block_size=value)

    def test_numbers_that_are_not_finite(self, trace_file: TraceFile) -> None:
        with pytest.raises(ConfigError, match="not a finite number"):
            open_trace(trace_file(HEADS["custom"]), words_to_tokens=float("inf"))

    def test_every_option_is_documented_and_its_default_is_legal(self, repo_root: Path) -> None:
        page = (repo_root / "docs" / "trace-formats.md").read_text()
        for name in BUILTINS["readers"]:
            reader = resolve("readers", name)
            assert issubclass(reader, Reader)
            assert reader.name == name
            assert f"`{name}`" in page
            for option, entry in reader.options.items():
                assert entry.doc
                assert f"`{option}`" in page
                assert entry.default is None or isinstance(entry.default, entry.type)

    def test_formats_and_policies_by_name(self, trace_file: TraceFile, tmp_path: Path) -> None:
        path = trace_file(HEADS["mooncake"])
        with pytest.raises(UnknownNameError, match="did you mean 'mooncake'"):
            open_trace(path, format="mooncacke")
        with pytest.raises(ConfigError, match="on_bad_row is 'ignore'"):
            open_trace(path, on_bad_row="ignore")
        for missing in (tmp_path / "none.jsonl", tmp_path):
            with pytest.raises(TraceError):
                open_trace(missing)
            with pytest.raises(TraceError, match="no such file"):
                open_trace(missing, format="mooncake")


class TestOrder:
    def test_one_origin_and_ties_in_file_order(self, trace_file: TraceFile) -> None:
        trace = open_trace(trace_file(native(7, 5, 9, 5, 7, 5)))
        got = [(r.request_id, r.arrival_s) for r in trace.requests()]
        assert got == [("r2", 0), ("r4", 0), ("r6", 0), ("r1", 2), ("r5", 2), ("r3", 4)]
        assert trace.report.num_backward_steps == 3
        assert any("3 backward steps" in warning for warning in trace.report.warnings)
        assert np.diff([r.arrival_s for r in trace.requests()]).min() >= 0

    def test_without_sorting_a_backward_step_is_an_error(self, trace_file: TraceFile) -> None:
        path = trace_file(native(1, 2, 1))
        with pytest.raises(TraceError, match=r":3: arrival: is earlier than that of the row above"):
            open_trace(path, sort=False).requests()
        assert open_trace(trace_file(native(1, 2, 2)), sort=False).num_requests == 3

    def test_a_row_that_is_left_out_is_nobody(self, trace_file: TraceFile) -> None:
        """Nobody's parent, and its sequences are none that an id could be mistaken for."""
        twice = native(0, request_id="a") + native(0, request_id="a", n=2)
        trace = open_trace(trace_file(twice + native(1, request_id="1_a")), on_bad_row="drop")
        assert [r.request_id for r in trace.requests()] == ["a", "1_a"]
        rows = native(1, request_id="a") + native(0, request_id="b")
        path = trace_file(rows + native(2, request_id="c", parent="b"))
        trace = open_trace(path, on_bad_row="drop", sort=False)
        assert [r.request_id for r in trace.requests()] == ["a"]
        assert trace.report.dropped == {"unsorted": 1, "orphan": 1}

    def test_a_missing_arrival_is_never_taken_for_zero(self, trace_file: TraceFile) -> None:
        path = trace_file('{"prompt_len": 8, "output_len": 1}\n' + native(100))
        with pytest.raises(TraceError, match=":1: arrival_s: is missing"):
            open_trace(path, format="simserve").requests()
        kept = list(open_trace(path, format="simserve", on_bad_row="drop").requests())
        assert [(r.request_id, r.arrival_s) for r in kept] == [("r2", 0.0)]

    def test_nearly_sorted_files_are_sorted_within_a_window(self, trace_file: TraceFile) -> None:
        rng = np.random.default_rng(5)
        arrivals = np.arange(400) + rng.uniform(0, 6, 400)
        trace = open_trace(trace_file(native(*arrivals.tolist())))
        got = [r.arrival_s for r in trace.requests()]
        assert got == pytest.approx(np.sort(arrivals) - arrivals.min(), abs=1e-12)

    def test_a_long_sorted_file_is_streamed(self, tmp_path: Path) -> None:
        path = tmp_path / "long.jsonl"
        with path.open("w") as file:
            file.writelines(native(i / 100) for i in range(5_000))
        trace = open_trace(path)
        assert trace.num_requests == 5_000
        tracemalloc.start()
        num_read = sum(1 for _ in trace.requests())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert num_read == 5_000
        assert peak < 200_000  # one request is some 500 bytes


class TestReading:
    def test_the_same_trace_twice(self, trace_file: TraceFile) -> None:
        trace = open_trace(trace_file(native(3, 1, 2)))
        first = list(trace.requests())
        half = list(islice(trace.requests(), 2))
        second = list(trace.requests())
        assert first == second
        assert half == first[:2]
        assert not any(a is b for a, b in zip(first, second, strict=True))

    def test_a_file_that_changes_is_noticed(self, trace_file: TraceFile) -> None:
        path = trace_file(native(1, 2))
        trace = open_trace(path)
        assert trace.num_requests == 2
        path.write_text(native(1, 2, 3))
        with pytest.raises(TraceError, match="the file has changed"):
            trace.requests()

    def test_gzipped_files_and_broken_ones(self, trace_file: TraceFile) -> None:
        packed = gzip.compress(native(*range(200)).encode())
        path = trace_file(packed, "t.jsonl.gz")
        trace = open_trace(path)
        assert trace.num_requests == 200
        assert trace.report.sha256 == hashlib.sha256(packed).hexdigest()
        with pytest.raises(TraceError, match=r"t\.jsonl\.gz: cannot be read"):
            open_trace(trace_file(packed[:-20], "t.jsonl.gz"), format="simserve").requests()

    def test_bytes_that_are_no_text_are_a_bad_row(self, trace_file: TraceFile) -> None:
        content = native(1).encode() + b'{"arrival_s": \xff}\n' + native(2).encode()
        path = trace_file(content)
        with pytest.raises(TraceError, match=r":2: row: is not UTF-8 text"):
            open_trace(path).requests()
        assert open_trace(path, on_bad_row="drop").num_requests == 2

    def test_nothing_left_says_why(self, trace_file: TraceFile) -> None:
        header = trace_file("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        with pytest.raises(TraceError, match="no requests: the file has no rows"):
            open_trace(header).requests()
        bad = trace_file(native(-1, -2))
        with pytest.raises(
            TraceError, match=r"all 2 rows were dropped \(2 for negative\), the fir"
        ):
            open_trace(bad, on_bad_row="drop").requests()
        events = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end"}
        with pytest.raises(TraceError, match="none of its 1 rows makes one"):
            open_trace(trace_file(json.dumps(events))).requests()

    def test_equal_ids_are_equal_tokens_in_every_process(
        self, trace_file: TraceFile, repo_root: Path
    ) -> None:
        import subprocess

        rows = [
            '{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [7, 8, 9]}',
            '{"timestamp": 1, "input_length": 40, "output_length": 1, "hash_ids": [7, 6, 5]}',
        ]
        path = trace_file("\n".join(rows))
        code = (
            "import sys; from simserve.segments import tokens; "
            "from simserve.workload.trace import open_trace; "
            "[print(tokens(r.prompt, 32000).tolist()) "
            "for r in open_trace(sys.argv[1], block_size=16).requests()]"
        )
        environment = {**os.environ, "PYTHONPATH": str(repo_root)}
        outputs = [
            subprocess.run(
                [sys.executable, "-c", code, str(path)],
                env={**environment, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        ]
        here = [tokens(r.prompt, 32000) for r in open_trace(path, block_size=16).requests()]
        assert outputs[0] == outputs[1] == "".join(f"{row.tolist()}\n" for row in here)
        assert np.array_equal(here[0][:16], here[1][:16])
        assert not np.any(np.all(here[0][16:32] == here[1][16:32]))


class TestReport:
    def test_low_rates_and_quantised_stamps_are_warned_about(self, trace_file: TraceFile) -> None:
        slow = open_trace(trace_file(native(*range(0, 10_000, 100)))).report
        assert slow.rate_per_s == pytest.approx(0.01)
        assert any("mean rate is 0.01 requests/s" in warning for warning in slow.warnings)
        ticks = open_trace(trace_file(native(*(3 * (i // 8) for i in range(80))))).report
        assert ticks.num_ties == 70
        expected = "timestamps are quantised: 10 different ones for 80 requests, at least 3 s apart"
        assert any(warning.startswith(expected) for warning in ticks.warnings)
        fine = open_trace(trace_file(native(0, 1, 2, 2))).report
        assert [w for w in fine.warnings if "arrival time" in w] == [
            "1 request with the arrival time of the one before; file order is kept"
        ]

    def test_a_clean_trace_has_no_warnings(self, trace_file: TraceFile) -> None:
        report = open_trace(trace_file(native(0, 1, 2))).report
        assert report.warnings == ()
        assert (report.num_rows, report.num_requests, report.num_dropped) == (3, 3, 0)
        assert report.span_s == 2

    def test_one_request_has_no_rate(self, trace_file: TraceFile) -> None:
        assert open_trace(trace_file(native(5))).report.rate_per_s is None

    def test_drops_are_counted_with_the_first_rows(self, trace_file: TraceFile) -> None:
        report = open_trace(trace_file(native(*([-1] * 15), 3)), on_bad_row="drop").report
        assert report.dropped == {"negative": 15}
        assert report.dropped_rows["negative"] == tuple(range(1, 11))
        assert report.warnings == (
            "15 of 16 rows dropped: 15 for negative (rows 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...)",
        )


class Countdown:
    """A reader of one's own, with no more than the protocol asks for."""

    name = "countdown"

    def sniff(self, path: Path, head: str) -> bool:
        return head.startswith("countdown")

    def read(self, path: Path, step_s: float = 1.0) -> Iterator[TraceRequest]:
        for i in range(3, 0, -1):
            prompt = ((f"c{i}", 4),)
            yield TraceRequest(
                request_id=f"c{i}", arrival_s=i * step_s, prompt=prompt, output_len=1
            )


def test_a_reader_of_ones_own_needs_only_the_protocol(
    trace_file: TraceFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILTINS["readers"], "countdown", f"{__name__}:Countdown")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    trace = open_trace(trace_file("countdown\n"), format="countdown", step_s=2.0)
    got = [(r.request_id, r.arrival_s) for r in trace.requests()]
    assert got == [("c1", 0.0), ("c2", 2.0), ("c3", 4.0)]
    with pytest.raises(ConfigError, match=r"options of trace format 'countdown': .*'steps'"):
        open_trace(trace_file("countdown\n"), format="countdown", steps=2)
    bad = open_trace(trace_file("countdown\n"), format="countdown", step_s=float("nan"))
    with pytest.raises(TraceError, match=":1: arrival_s: is nan"):
        bad.requests()


def test_options_may_have_any_name(trace_file: TraceFile) -> None:
    path = trace_file(native(1, 2))
    for name in ("path", "format", "sort", "on_bad_row", "base_dir"):
        with pytest.raises(ConfigError, match=f"'simserve' has no option '{name}'"):
            open_trace(path, reader_options={name: 1})


def test_a_module_beside_the_configuration_is_found(
    trace_file: TraceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "beside"
    folder.mkdir()
    text = "from simserve.workload.readers.native import NativeReader as Mine\n"
    (folder / "reader_beside.py").write_text(text)
    config = {
        "model": "llama-3.1-8b",
        "workload": {
            "trace": {"path": str(trace_file(native(1, 2))), "format": "reader_beside:Mine"}
        },
    }
    loaded = load_config(config, base_dir=folder)
    assert loaded.config.workload.trace is not None
    assert trace_of(loaded, loaded.config.workload.trace).num_requests == 2


def test_a_reader_without_a_method_is_refused(
    trace_file: TraceFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mute:
        def sniff(self, path: Path, head: str) -> bool:
            return True

    monkeypatch.setattr(sys.modules[__name__], "Countdown", Mute)
    monkeypatch.setitem(BUILTINS["readers"], "countdown", f"{__name__}:Countdown")
    with pytest.raises(PluginError, match="cannot serve as a trace reader: it lacks read"):
        open_trace(trace_file("countdown\n"), format="countdown")


def test_readers_alone_follow_the_protocol(trace_file: TraceFile) -> None:
    for name in (n for n in HEADS if n != "servegen"):
        path = trace_file(HEADS[name])
        reader = resolve("readers", name)()
        (request,) = reader.read(path)
        assert request.prompt_len == 4
        options = {key: option.default for key, option in reader.options.items()}
        (row,) = reader.rows(path, RowLog(path), options)
        assert request.arrival_s == row.ticks / reader.ticks_per_s
