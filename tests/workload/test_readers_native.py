"""simserve's own format: every field survives, nothing unknown passes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simserve.errors import TraceError
from simserve.types import MmItem, TraceRequest
from simserve.workload.readers import native
from simserve.workload.trace import open_trace, write_trace

TraceFile = Callable[..., Path]

names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
seconds = st.floats(0, 1e6, allow_nan=False)


@st.composite
def parts(draw: st.DrawFn) -> tuple[Any, ...]:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
        segment = draw(st.one_of(st.integers(-5, 2**80), names, st.just(tuple(ids))))
        longest = len(segment) if isinstance(segment, tuple) else 2000
        made.append((segment, draw(st.integers(1, longest))))
    return tuple(made)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests in order of arrival from 0 s; parents stand above."""
    made: list[TraceRequest] = []
    arrivals = sorted(draw(st.lists(seconds, max_size=3)))
    for index, arrival_s in enumerate([0.0, *arrivals]):
        request_id = f"{draw(names)}{index}"
        plain = ((f"{request_id}/prompt", draw(st.integers(1, 99))),)
        prompt = draw(st.one_of(parts(), st.just(plain)))
        output = draw(st.one_of(st.none(), parts()))
        output_len = sum(n for _, n in output) if output else draw(st.integers(1, 999))
        total = sum(n for _, n in prompt)
        items = draw(st.lists(st.tuples(names, st.integers(0, total - 1)), max_size=2))
        made.append(
            TraceRequest(
                request_id=request_id,
                arrival_s=arrival_s,
                prompt=prompt,
                output=output,
                output_len=output_len,
                class_=draw(st.one_of(st.just(""), names)),
                priority=draw(st.integers(-3, 3)),
                session=draw(st.one_of(st.none(), names)),
                turn=draw(st.integers(0, 3)),
                parent=draw(st.sampled_from([None, *(r.request_id for r in made)])),
                think_time_s=draw(st.one_of(st.just(0.0), seconds)),
                cache_salt=draw(st.one_of(st.none(), names)),
                lora_id=draw(st.one_of(st.none(), st.integers(0, 9), names)),
                mm_items=tuple(MmItem(name, offset, 1) for name, offset in items),
                prompt_logprobs=draw(st.booleans()),
                n=draw(st.integers(1, 3)),
                group=draw(st.one_of(st.none(), names)),
                sibling=draw(st.integers(0, 2)),
            )
        )
    return made


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=traces())
def test_every_field_survives(requests: list[TraceRequest], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert write_trace(path, requests) == len(requests)
    trace = open_trace(path)
    assert trace.format == "simserve"
    assert list(trace.requests()) == requests


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    good = TraceRequest(request_id="a", arrival_s=0.0, prompt=(("s", 4),), output_len=1)
    bad = TraceRequest(request_id="b", arrival_s=float("nan"), prompt=(("s", 4),), output_len=1)
    write_trace(path, [good])
    before = path.read_bytes()
    with pytest.raises(TraceError, match="request b: cannot be written"):
        write_trace(path, [good, bad])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(tmp_path / "no" / "folder.jsonl", [good])


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    one = TraceRequest(request_id="a", arrival_s=0.0, prompt=(("a", 4),), output_len=1)
    link, file, pipe = (tmp_path / name for name in ("link", "file.jsonl", "pipe"))
    link.symlink_to(file)
    assert write_trace(link, [one]) == 1
    assert link.is_symlink()
    assert open_trace(file).num_requests == 1
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert write_trace(pipe, [one]) == 1
    assert os.read(reader, 1 << 16) == file.read_bytes()
    os.close(reader)
    assert pipe.is_fifo()


def test_numbers_of_numpy_are_refused_or_exact(tmp_path: Path) -> None:
    request = TraceRequest(
        request_id="a",
        arrival_s=np.float64(0.0),
        prompt=(("s", 4),),
        output_len=np.int64(3),  # type: ignore[arg-type]
    )
    with pytest.raises(TraceError, match="request a: cannot be written"):
        write_trace(tmp_path / "out.jsonl", [request])


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    prompt = (("s", 2**31),)
    request = TraceRequest(request_id="a", arrival_s=0.0, prompt=prompt, output_len=1)
    with pytest.raises(TraceError, match=r"^request a: cannot be written: 2147483648 \+ 1 tokens"):
        write_trace(tmp_path / "out.jsonl", [request])
    assert not list(tmp_path.iterdir())


def test_the_example_of_the_documentation_is_legal(trace_file: TraceFile, repo_root: Path) -> None:
    page = (repo_root / "docs" / "trace-formats.md").read_text()
    example = page.split("```json\n")[1].split("```")[0]
    first, second, _ = open_trace(trace_file(example)).requests()
    assert second.prompt[:3] == first.prompt + first.output_parts
    for key in native.KEYS:
        assert f"| `{key}` |" in page


def test_settings_of_a_request_are_read_and_written(trace_file: TraceFile, tmp_path: Path) -> None:
    asked = {
        "temperature": 0.5,
        "seed": 7,
        "logit_bias": {"5": 1.5},
        "bad_words": [[1, 2], [3]],
        "stop_token_ids": [9],
        "ignore_eos": False,
        "logprobs": 2,
    }
    (one,) = open_trace(trace_file(json.dumps(BASE | {"sampling": asked}))).requests()
    assert one.sampling == asked | {
        "logit_bias": {5: 1.5},
        "bad_words": ((1, 2), (3,)),
        "stop_token_ids": (9,),
    }
    write_trace(tmp_path / "out.jsonl", [one])
    assert list(open_trace(tmp_path / "out.jsonl").requests()) == [one]


BASE = {"request_id": "a", "arrival_s": 0, "prompt_len": 8, "output_len": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival": 1}, r"arrival: unknown key \(did you mean 'arrival_s'"),
        ({"zzz": 1}, "zzz: unknown key; the keys are request_id, arrival_s"),
        ({"arrival_s": None}, "arrival_s: is null"),
        ({"arrival_s": -1}, "arrival_s: is -1, but must not be negative"),
        ({"output_len": 0}, "output_len: is 0: a request needs at least one output token"),
        ({"prompt_len": "8"}, "prompt_len: is '8', not a whole number"),
        ({"request_id": ""}, "request_id: is '', not a non-empty text"),
        ({"sampling": 1}, "sampling: is not an object of settings"),
        ({"sampling": {"topp": 0.9}}, r"sampling\.topp: unknown setting \(did you mean 'top_p'"),
        ({"sampling": {"top_k": 1.5}}, r"sampling\.top_k: is not a whole number"),
        ({"sampling": {"temperature": 10**400}}, r"sampling\.temperature: is not a number"),
        ({"sampling": {"top_k": -2}}, "sampling: top_k is -2: it must be at least 1"),
        ({"sampling": {"logprobs": 21}}, r"sampling\.logprobs: is more than 20"),
        ({"sampling": {"min_tokens": 3}}, r"sampling\.min_tokens: is 3, more than the 2 tokens"),
        ({"sampling": {"logit_bias": {"a": 1}}}, r"sampling\.logit_bias: is not an object of"),
        ({"request_id": 1.5}, "request_id: is 1.5"),
        ({"request_id": "\ud800"}, "request_id: holds half a surrogate pair"),
        ({"prompt": []}, "prompt: is not a list of"),
        ({"prompt": [["s", 0]]}, r"prompt\[0\]: has a length"),
        ({"prompt": [["s", 8], ["t"]]}, r"prompt\[1\]: is not \[segment, length\]"),
        ({"prompt": [[[1, 2], 8]]}, r"prompt\[0\]: does not hold 8 token ids"),
        ({"prompt": [[None, 8]]}, r"prompt\[0\]: has a segment that is no whole number"),
        ({"prompt": [[True, 8]]}, r"prompt\[0\]: has a segment"),
        ({"prompt": [["s", 2**31]]}, "prompt: is more than"),
        ({"prompt": [["s", 9]]}, "prompt_len: is 8, but the parts of prompt have 9"),
        ({"output": [["s", 9]]}, "output_len: is 2, but the parts of output have 9"),
        ({"priority": 1.5}, "priority: is not a whole number"),
        ({"turn": -1}, "turn: is not a whole number >= 0"),
        ({"think_time_s": -0.5}, "think_time_s: is -0.5"),
        ({"lora_id": True}, "lora_id: is true"),
        ({"cache_salt": 0.5}, "cache_salt: is 0.5"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: is neither"),
        ({"mm_items": {}}, "mm_items: is not a list"),
        ({"mm_items": [{"identifier": "i"}]}, r"mm_items\[0\]: is not"),
        (
            {"mm_items": [{"identifier": "i", "offset": 4, "length": 5}]},
            r"mm_items\[0\]: ends beyond",
        ),
        ({"parent": "b"}, "parent: 'b' is the id of no row above"),
        ({"parent": "a"}, "parent: 'a' is the id of no row above"),
    ],
)
def test_wrong_fields_are_named(
    trace_file: TraceFile, change: dict[str, Any], message: str
) -> None:
    path = trace_file(json.dumps(BASE | change))
    with pytest.raises(TraceError, match=rf"trace\.jsonl:1: {message}"):
        open_trace(path, format="simserve").requests()


def test_a_dropped_parent_takes_its_children_along(trace_file: TraceFile) -> None:
    rows = [
        BASE,
        BASE | {"request_id": "b", "output_len": 0},
        BASE | {"request_id": "c", "parent": "b"},
        BASE | {"request_id": "d", "parent": "a"},
        BASE | {"request_id": "a"},
    ]
    trace = open_trace(trace_file("\n".join(map(json.dumps, rows))), on_bad_row="drop")
    assert [r.request_id for r in trace.requests()] == ["a", "d"]
    assert trace.report.dropped == {"zero_output": 1, "orphan": 1, "duplicate_id": 1}
