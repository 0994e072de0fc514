"""Step logs become plain records, and whatever is wrong with one is named: file, row and field."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simserve.errors import TraceError
from simserve.fidelity.logs.log_plans import log_plans
from simserve.fidelity.logs.vllm_log import StepLog, parse_vllm_log, preset_in, read_vllm_log
from simserve.types import Kind
from tests.fidelity.conftest import write


def test_every_value_arrives_in_seconds_and_under_its_name(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    log = read_vllm_log(write(tmp_path / "a.json.gz", document))
    assert (log.name, log.engine, log.gpu) == ("tiny", "vllm-0.20.2", "NVIDIA H200")
    config = log.config
    assert (config.max_num_batched_tokens, config.long_prefill_token_threshold) == (32, 0)
    assert (config.max_num_seqs, config.block_size, config.max_model_len) == (4, 16, 40960)
    assert config.num_gpu_blocks == 101  # with the null block
    first, second = log.requests
    assert (first.request_id, first.arrival_s, first.output_len) == ("0", 0.001, 2)
    assert second.prompt == ((7, 16), (8, 4))
    assert log.added_s.tolist() == pytest.approx([0.0015, 0.03105])
    assert log.token_times_s[0].tolist() == pytest.approx([0.031, 0.0411])
    steps = log.steps
    assert len(steps) == 3
    assert steps.start_s.tolist() == pytest.approx([0.002, 0.021, 0.0311])
    assert steps.duration_s.tolist() == pytest.approx([0.018, 0.01, 0.01])
    assert steps.end_s.tolist() == pytest.approx([0.02, 0.031, 0.0411])
    assert steps.schedule_s.tolist() == pytest.approx([1e-4, 1e-4, 1.1e-4])
    assert steps.update_s.tolist() == pytest.approx([2e-5, 2e-5, 3e-5])
    assert [steps.rows(j) for j in range(3)] == [((0, 32, 0),), ((0, 8, 32),),
                                                 ((0, 1, 40), (1, 4, 16))]  # fmt: skip


def test_plans_are_rebuilt_with_kinds_and_tokens(document: dict[str, Any]) -> None:
    document["steps"][2][5] = [0]  # the first request is preempted after its first token ...
    document["steps"][2][4] = [[1, 4, 16]]
    document["steps"].append([41200, 9000, 90, 10, [[0, 25, 16]], []])  # ... and comes back
    plans = list(log_plans(parse_vllm_log(Path("x"), document)))
    assert [plan.kinds for plan in plans] == [{"0": Kind.NEW}, {}, {"1": Kind.NEW},
                                              {"0": Kind.RESUMED}]  # fmt: skip
    assert [plan.samples for plan in plans] == [[False], [True], [True], [True]]
    assert [plan.preempted_ids for plan in plans] == [[], [], ["0"], []]


Spoil = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: d["config"].pop("num_free_blocks"), r"config: num_free_blocks: must be a whole"),
        (lambda d: d["config"].update(budget=0), r"config: budget: .* at least 1, is 0"),
        (lambda d: d["config"].update(prefix_caching=1), r"config: prefix_caching: must be true"),
        (lambda d: d.update(requests=[]), r"requests: requests: must be a list of at least one"),
        (lambda d: d["requests"].append(3), r"requests\[2\]: request: must be an object"),
        (lambda d: d["requests"][1].update(arrival=float("nan")), r"requests\[1\]: arrival: must"),
        (lambda d: d["requests"][1].update(segs=[[7]]), r"requests\[1\]: segs: must be \[segment"),
        (lambda d: d["requests"][1].update(segs=[[7, 0]]), r"requests\[1\]: segs: .* least 1"),
        (lambda d: d["requests"][0].update(out="2"), r"requests\[0\]: out: must be a whole"),
        (lambda d: d["requests"][0].pop("added"), r"requests\[0\]: added: must be a whole"),
        (lambda d: d["requests"][0].update(times=[5, 4]), r"requests\[0\]: times: must not dec"),
        (lambda d: d["requests"][1].update(times=[1, 2]), r"requests\[1\]: times: 2 token times"),
        (lambda d: d["steps"].append([1, 2]), r"steps\[3\]: step: must be a list of 6"),
        (lambda d: d["steps"][1].__setitem__(1, -5), r"steps\[1\]: duration: .*, is -5"),
        (lambda d: d["steps"][1].__setitem__(0, 100), r"steps\[1\]: start: lies before the end"),
        (lambda d: d["steps"][2][4].append([2, 1, 0]), r"steps\[2\]: rows: request 2 is not one"),
        (lambda d: d["steps"][2][4].append([1, 0, 0]), r"steps\[2\]: rows: tokens must be posit"),
        (lambda d: d["steps"][2][4].append([1, 0.5, 0]), r"steps\[2\]: rows: must be \[request"),
        (lambda d: d["steps"][2].__setitem__(5, [None]), r"steps\[2\]: preempted: must be a whole"),
        (
            lambda d: d["steps"][2].__setitem__(5, [7]),
            r"steps\[2\]: preempted: request 7 is not one",
        ),
        (
            lambda d: d["steps"][2].__setitem__(5, [0, 0]),
            r"steps\[2\]: preempted: request 0 .* twice",
        ),
        (
            lambda d: d["steps"][2][4][1].__setitem__(2, 10**15),
            r"steps\[2\]: rows: tokens must be positive, and at most 21 \(prompt and out\)",
        ),
        (
            lambda d: d["requests"][1].update(segs=[[7, 10**10]]),
            r"requests\[1\]: segs: .* up to 10",
        ),
        (lambda d: d["requests"][1].update(out=10**10), r"requests\[1\]: out: .* up to 10"),
        (lambda d: d.update(name=None), r"log: name: must be text, is None"),
        (lambda d: d.update(engine=["vllm"]), r"log: engine: must be text, is \['vllm'\]"),
        (lambda d: d["steps"][2][4].append([1, 10**30, 0]), r"steps\[2\]: rows: tokens must be"),
        (
            lambda d: d["steps"][1].__setitem__(2, 10**9),
            r"steps\[1\]: duration: is shorter than sch",
        ),
        (lambda d: d["requests"][1].update(added=0), r"requests\[1\]: added: lies before its arr"),
        (
            lambda d: d["requests"][0].update(added=10**9),
            r"requests\[0\]: added: lies after the start",
        ),
        (lambda d: d["config"].update(block_size=10**9), r"config: block_size: .* up to 65536"),
        (
            lambda d: d["config"].update(num_free_blocks=10**12),
            r"config: num_free_blocks: .* up to",
        ),
        (lambda d: d["steps"][2][4].append([0, 1, 41]), r"steps\[2\]: rows: .* twice in a step"),
        (lambda d: [s[4].clear() for s in d["steps"]], r"steps: steps: must hold a step that sch"),
        (lambda d: d["requests"][1].update(times=[14990]), r"requests\[1\]: times: 14990 us lies"),
        (lambda d: d["requests"][1].update(priority="x"), r"requests\[1\]: priority: must be a wh"),
        (lambda d: d["config"].update(async_scheduling=True), r"config: async_scheduling: must be"),
        (lambda d: d["config"].update(policy="lifo"), r"config: policy: must be 'fcfs' or 'prio"),
        (lambda d: d["config"].update(scheduler_reserve_full_isl=1), r"config: scheduler_reserve"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, document: dict[str, Any], spoil: Spoil, says: str
) -> None:
    spoil(document)
    path = write(tmp_path / "bad.json.gz", document)
    with pytest.raises(TraceError, match=rf"bad\.json\.gz: {says}"):
        read_vllm_log(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{}", "not a gzipped JSON file"),
        (gzip.compress(b"{", mtime=0), "not a gzipped JSON file"),
        (gzip.compress(b"[" * 100_000, mtime=0), "not a gzipped JSON file"),
        (gzip.compress(b"{}", mtime=0), "not a step log: it needs `config`"),
        (gzip.compress(b'{"config": {}, "requests": [], "steps": []}', mtime=0), "not a step log"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "other.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_vllm_log(path)


def test_a_start_may_be_rounded_below_the_end_before_it(document: dict[str, Any]) -> None:
    document["steps"][1][0] = 19999
    log: StepLog = parse_vllm_log(Path("x"), document)
    assert log.steps.start_s[1] < log.steps.end_s[0]


def test_steps_in_which_there_was_nothing_to_do_are_left_out(document: dict[str, Any]) -> None:
    document["steps"].insert(0, [0, 10, 5, 1, [], []])
    document["steps"].insert(2, [20500, 10, 5, 1, [], []])
    document["steps"].append([42000, 10, 5, 1, [], []])
    log = parse_vllm_log(Path("x"), document)
    assert log.steps.start_s.tolist() == pytest.approx([0.002, 0.021, 0.0311])
    document["steps"][3][0] = 19000  # errors still name the place in the file
    with pytest.raises(TraceError, match=r"steps\[3\]: start: lies before the end"):
        parse_vllm_log(Path("x"), document)


def test_a_request_that_ended_early_is_as_long_as_what_came_out(document: dict[str, Any]) -> None:
    document["requests"][0]["out"] = 500
    document["requests"][1].update(out=500, times=[])
    lengths = [request.output_len for request in parse_vllm_log(Path("x"), document).requests]
    assert lengths == [2, 500]


def test_settings_beyond_the_format_are_kept_to_be_told(document: dict[str, Any]) -> None:
    document["config"].update(reset_before=True, policy="fcfs", dtype="float8")
    assert parse_vllm_log(Path("x"), document).config.not_read == {"dtype": "float8"}
    document["config"].update(reset_before=False)
    assert parse_vllm_log(Path("x"), document).config.not_read["reset_before"] is False


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama-3.1-8B shape, dummy weights", "llama-3.1-8b"),
        ("llama-3.1-8b, bf16", "llama-3.1-8b"),
        ("my-llama-3.1-8b", None),
        ("", None),
    ],
)
def test_presets_are_found_in_words(text: str, name: str | None) -> None:
    assert preset_in(text, ["llama-3.1-70b", "llama-3.1-8b", "llama"]) == name
