"""Requests that become several: siblings of one prompt, rounds of a beam search."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simserve
from simserve.config.build import build, with_pool_size
from simserve.config.loader import load_config
from simserve.engine.simulation import simulate
from simserve.errors import ConfigError, TraceError
from simserve.segments import tokens
from simserve.types import TraceRequest
from simserve.workload.beams import DrawnForks
from simserve.workload.groups import Grouped, Method
from simserve.workload.ranked import RankedBeams
from simserve.workload.siblings import ByClass, Parallel
from simserve.workload.source import OpenLoop
from simserve.workload.trace import write_trace

VOCABULARY = 2**40
"""So large that two different tokens of a test are never equal by chance."""


def asked(request_id: str = "a", prompt_len: int = 40, output_len: int = 5, **more: Any) -> Any:
    prompt = ((f"{request_id}/prompt", prompt_len),)
    return TraceRequest(
        **{
            "request_id": request_id,
            "arrival_s": 0.0,
            "prompt": prompt,
            "output_len": output_len,
            **more,
        }
    )


def config(workload: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": "llama-3.1-8b",
        "workload": workload,
        "kv_cache": {"num_gpu_blocks": 5000, "block_size": 16},
        "executor": {"cost": {"kind": "formula", "base_s": 0.01, "per_token_s": 1e-5}},
        **more,
    }


def alone(decoding: dict[str, Any], prompt_len: int = 100, output_len: int = 20) -> dict[str, Any]:
    """One request of a user."""
    return {
        "synthetic": {
            "num_requests": 1,
            "arrival": {"kind": "immediate"},
            "prompt_len": {"kind": "constant", "value": prompt_len},
            "output_len": {"kind": "constant", "value": output_len},
        },
        "decoding": decoding,
    }


def ids_of(requests: list[TraceRequest] | Any) -> list[str]:
    return [request.request_id for request in requests]


# -- siblings ------------------------------------------------------------------------------------


def test_siblings_share_a_prompt_and_nothing_else() -> None:
    first, *others = Parallel(n=3).open(asked(class_="x", session="s", n=1)).first()
    assert ids_of([first, *others]) == ["0_a", "1_a", "2_a"]
    assert first.output_parts == (("a/output", 5),)
    assert [one.output_parts for one in others] == [(("1_a/output", 5),), (("2_a/output", 5),)]
    for one in (first, *others):
        assert (one.prompt, one.arrival_s, one.class_) == (asked().prompt, 0.0, "x")
        assert (one.n, one.group, one.session) == (1, "a", "s")


def test_one_sequence_stays_the_request() -> None:
    assert Parallel().open(asked(prompt_len=7)).first() == [asked(prompt_len=7)]


def test_sequences_end_early_by_draws_of_their_own() -> None:
    method = Parallel(n=4, end_probability=0.1, seed=3)
    lens = {
        name: [one.output_len for one in method.open(asked(name, output_len=50)).first()]
        for name in ("a", "b")
    }
    assert lens["a"] != lens["b"]
    assert all(1 <= length <= 50 for length in lens["a"] + lens["b"])
    again = method.open(asked("a", output_len=50)).first()
    assert [one.output_len for one in again] == lens["a"]
    assert all(sum(n for _, n in one.output_parts) == one.output_len for one in again)
    many = Parallel(n=4000, end_probability=0.1).open(asked(output_len=10**6)).first()
    assert sum(one.output_len for one in many) / 4000 == pytest.approx(10, rel=0.06)


def test_a_trace_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [asked("a", n=3), asked("b", arrival_s=1.0)])
    result = simserve.run(config({"trace": {"path": str(path)}}))
    assert list(result.requests["request_id"]) == ["0_a", "1_a", "2_a", "b"]
    assert result.requests_table["group"].to_pylist() == ["a", "a", "a", None]
    assert result.summary_dict["group.num_prompts"] == 1
    both = config({"trace": {"path": str(path)}, "decoding": {"kind": "parallel", "n": 2}})
    with pytest.raises(TraceError, match=r"trace.jsonl:1: n: is 3, but workload.decoding"):
        simserve.run(both)


def test_the_next_turn_waits_for_all_and_continues_the_first() -> None:
    spec = {
        "num_sessions": 1,
        "turns": {"kind": "constant", "value": 2},
        "think_time_s": 1.0,
    }
    synthetic = {
        "arrival": {"kind": "immediate"},
        "sessions": spec,
        "prompt_len": {"kind": "constant", "value": 64},
        "output_len": {"kind": "constant", "value": 64},
    }
    decoding = {"kind": "parallel", "n": 3, "end_probability": 0.02}
    result = simserve.run(config({"synthetic": synthetic, "decoding": decoding}, seed=1))
    rows = result.requests.set_index("request_id")
    turn = rows[rows["group"] == "s0/t0"]
    assert len(set(turn["output_length"])) > 1
    later = rows[rows["group"] == "s0/t1"]
    assert list(later["arrival_time_s"]) == [turn["last_token_s"].max() + 1.0] * 3
    whole = 64 + rows.loc["0_s0/t0", "output_length"] - 1
    assert next(iter(later["cached_tokens"])) == whole // 16 * 16


def test_a_class_has_a_way_of_its_own() -> None:
    workload = alone({"kind": "parallel", "n": 2})
    workload["synthetic"] |= {
        "num_requests": 3,
        "classes": [
            {"name": "one", "count": 1, "decoding": {"kind": "parallel"}},
            {"name": "beams", "count": 1, "decoding": {"kind": "beam_search", "beam_width": 3}},
            {"name": "two", "count": 1},
        ],
    }
    counts = simserve.run(config(workload)).requests["class"].value_counts()
    assert dict(counts) == {"one": 1, "two": 2, "beams": 1 + 3 * 19}


def test_a_group_is_one_request_to_a_cap() -> None:
    workload = alone({"kind": "parallel", "n": 4})
    workload["synthetic"]["num_requests"] = 3
    rows = simserve.run(config({**workload, "max_concurrency": 1})).requests
    spans = rows.groupby("group", sort=False)[["arrival_time_s", "ended_s"]].agg(["min", "max"])
    assert list(spans["arrival_time_s"]["min"])[1:] == list(spans["ended_s"]["max"])[:-1]


# -- what is measured ------------------------------------------------------------------------------


def group_view(rows: pd.DataFrame) -> pd.DataFrame:
    spans = rows.groupby("group").agg(
        arrival=("arrival_time_s", "min"), first=("first_token_s", "min"), last=("ended_s", "max")
    )
    return pd.DataFrame(
        {
            "ttft": 1e3 * (spans["first"] - spans["arrival"]),
            "e2el": 1e3 * (spans["last"] - spans["arrival"]),
        }
    )


@pytest.mark.parametrize(
    "decoding",
    [
        {"kind": "parallel", "n": 4, "end_probability": 0.05},
        {"kind": "beam_search", "beam_width": 3, "fork_probability": 0.4},
    ],
)
def test_a_group_is_measured_from_its_first_to_its_last(decoding: dict[str, Any]) -> None:
    workload = alone(decoding)
    workload["synthetic"] |= {"num_requests": 5, "arrival": {"kind": "poisson", "rate": 20}}
    result = simserve.run(config(workload))
    summary, view = result.summary_dict, group_view(result.requests)
    for metric in ("ttft", "e2el"):
        assert summary[f"group.mean_{metric}_ms"] == pytest.approx(view[metric].mean())
        assert summary[f"group.p99_{metric}_ms"] == pytest.approx(view[metric].quantile(0.99))
    assert summary["group.completed"] == summary["group.num_prompts"] == 5
    assert summary["num_computed_tokens"] == result.steps["num_tokens"].sum()
    assert summary["max_num_running"] == result.steps["num_running"].max()
    assert summary["max_kv_blocks"] == 4999 - result.steps["num_free_blocks"].min()


@pytest.mark.parametrize(
    ("decoding", "most_blocks"),
    [
        # All but the last block of the prompt, which is computed again, and 3 of its own each.
        ({"kind": "parallel", "n": 6}, 9 + 6 * 3),
        # The whole prompt, and 2 blocks of its own each: no beam takes another's place.
        ({"kind": "beam_search", "beam_width": 6}, 10 + 6 * 2),
    ],
)
def test_without_sharing_the_peak_is_that_of_all(
    decoding: dict[str, Any], most_blocks: int
) -> None:
    workload = alone(decoding, prompt_len=160)
    shared, apart = (
        simserve.run(config(workload), [f"kv_cache.enable_prefix_caching={on}"]).summary_dict
        for on in ("true", "false")
    )
    assert apart["max_kv_blocks"] == apart["max_unshared_kv_blocks"] == 6 * -(-179 // 16)
    assert shared["max_unshared_kv_blocks"] == apart["max_unshared_kv_blocks"]
    assert shared["max_kv_blocks"] == most_blocks


def test_runs_of_steps_change_nothing() -> None:
    workload = alone({"kind": "parallel", "n": 5, "end_probability": 0.02}, output_len=60)
    workload["synthetic"] |= {"num_requests": 4, "arrival": {"kind": "poisson", "rate": 4}}
    loaded = with_pool_size(load_config(config(workload)))
    found = []
    for leap in (True, False):
        built = build(loaded, 0, leap=leap)
        simulate(built.parts)
        data = built.recorder.data()
        found.append((data.max_unshared_blocks, data.requests.ended_s.tolist(), data.end_s))
    assert found[0] == found[1]


# -- beams ---------------------------------------------------------------------------------------


def rounds_of(method: Method, request: TraceRequest) -> list[list[TraceRequest]]:
    """All rounds of a search, each request of which completes."""
    workload = Grouped(OpenLoop([request]), method)
    rounds = []
    while (now_s := workload.next_arrival()) is not None:
        ready = []
        while workload.next_arrival() == now_s:
            ready.append(workload.take())
        rounds.append(ready)
        for one in ready:
            workload.finished(one.request_id, now_s + 1.0)
    return rounds


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 6),
    output_len=st.integers(1, 30),
    fork=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    seed=st.integers(0, 99),
)
def test_each_beam_continues_one_before_it(
    width: int, output_len: int, fork: float, seed: int
) -> None:
    method = DrawnForks(beam_width=width, fork_probability=fork, seed=seed)
    rounds = rounds_of(method, asked(prompt_len=9, output_len=output_len))
    assert [len(one) for one in rounds] == [1] + [width] * (output_len - 1)
    before: list[tuple[int, ...]] = []
    for number, requests in enumerate(rounds):
        now = [tuple(tokens(one.prompt, VOCABULARY).tolist()) for one in requests]
        assert len(set(now)) == len(now), "no two beams are the same"
        assert {len(one) for one in now} == {9 + number}
        assert {one.output_len for one in requests} == {1}
        if before:
            parents = [before.index(one[:-1]) for one in now]
            if fork == 0 and len(before) > 1:
                assert parents == list(range(width))
            if fork == 1 and len(before) > 1:
                assert all(parent != i for i, parent in enumerate(parents))
        before = now


@settings(max_examples=15, deadline=None)
@given(
    width=st.integers(1, 5),
    prompt_len=st.integers(1, 70),
    output_len=st.integers(1, 25),
    fork=st.sampled_from([0.0, 0.5, 1.0]),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_a_round_computes_what_full_blocks_leave(
    width: int, prompt_len: int, output_len: int, fork: float, block_size: int
) -> None:
    decoding = {"kind": "beam_search", "beam_width": width, "fork_probability": fork}
    cache = {"num_gpu_blocks": 5000, "block_size": block_size}
    result = simserve.run(config(alone(decoding, prompt_len, output_len), kv_cache=cache))
    rows, steps = result.requests, result.steps
    assert len(rows) == 1 + width * (output_len - 1)
    assert list(rows["output_length"]) == [1] * len(rows)
    # All tokens but its last were computed for the beam that it continues.
    usable = (rows["input_length"] - 1) // block_size * block_size
    assert list(rows["cached_tokens"])[1:] == list(usable)[1:]
    assert list(steps["num_scheduled"]) == [1] + [width] * (output_len - 1)
    assert steps["num_tokens"].sum() == (rows["input_length"] - rows["cached_tokens"]).sum()


def test_finished_sequences_make_no_room_but_may_end_the_search() -> None:
    request = asked(output_len=12)
    always = {"beam_width": 4, "end_probability": 1.0}
    assert len(rounds_of(DrawnForks(**always), request)) == 12
    assert len(rounds_of(DrawnForks(**always, early_stopping=True), request)) == 2
    never = DrawnForks(beam_width=4, early_stopping=True)
    assert len(rounds_of(never, request)) == 12


def test_a_round_that_cannot_run_ends_its_search_alone() -> None:
    workload = alone({"kind": "beam_search", "beam_width": 3}, prompt_len=50, output_len=20)
    workload["synthetic"]["num_requests"] = 2
    result = simserve.run(
        config({**workload, "max_concurrency": 1}, scheduler={"max_model_len": 55})
    )
    summary = result.summary_dict
    assert summary["status"] == "completed"
    assert summary["group.num_prompts"] == 2
    assert summary["group.completed"] == 0
    assert summary["rejected"] == 2 * 3
    assert summary["completed"] == 2 * (1 + 3 * 4)


def test_nothing_follows_an_aborted_request() -> None:
    told = []

    class Watched(OpenLoop):
        def finished(self, request_id: str, now_s: float, completed: bool = True) -> None:
            told.append((request_id, now_s, completed))

    workload = Grouped(Watched([asked()]), DrawnForks(beam_width=2))
    workload.finished(workload.take().request_id, 1.0)
    ids = [workload.take().request_id for _ in range(2)]
    assert ids == ["a/1-0", "a/1-1"]
    workload.finished("a/1-0", 2.0, completed=False)
    assert told == []
    workload.finished("a/1-1", 3.0)
    assert told == [("a", 3.0, False)]
    assert workload.next_arrival() is None


def test_equal_runs_are_equal() -> None:
    decoding = {
        "kind": "beam_search",
        "beam_width": 4,
        "fork_probability": 0.5,
        "end_probability": 0.15,
        "early_stopping": True,
    }
    first, second = (simserve.run(config(alone(decoding))) for _ in range(2))
    assert first.requests_table.equals(second.requests_table)
    rounds = {len(simserve.run(config(alone(decoding), seed=seed)).requests) for seed in range(4)}
    assert len(rounds) > 1


# -- log-probabilities -----------------------------------------------------------------------------


class Made:
    """Outcomes that are made up: the same continuations behind every beam."""

    def __init__(self, continuations: dict[int, float]) -> None:
        self._ids = np.array([99, *continuations], dtype=np.int32)
        self._logprobs = np.array([-9.0, *continuations.values()], dtype=np.float32)

    def take(self, request_id: str) -> Any:
        return SimpleNamespace(ids=[self._ids], logprobs=[self._logprobs])


def search(continuations: dict[int, float], output_len: int, **options: Any) -> Any:
    """The rounds and choices of a search of width 2; token 0 ends a sequence."""
    choices: list[Any] = []
    method = RankedBeams(
        beam_width=2,
        outcomes=Made(continuations),
        chosen=choices.append,
        eos_token_id=0,
        **options,
    )
    return rounds_of(method, asked(prompt_len=4, output_len=output_len)), choices


def test_beams_are_ranked_over_all_continuations() -> None:
    rounds, choices = search({1: -0.5, 2: -1.0, 3: -4.0, 4: -5.0}, 3)
    found = [[one.prompt[1][0] for one in requests] for requests in rounds[1:]]
    # Of two sequences with one sum, the one whose beam stands first.
    assert found == [[(1,), (2,)], [(1, 1), (1, 2)]]
    assert [one.logprobs for one in rounds[0]] == [4]
    assert [one.token_ids for one in choices] == [(1, 1, 1), (1, 1, 2)]
    assert [one.cumulative_logprob for one in choices] == [-1.5, -2.0]
    assert [one.score for one in choices] == [-1.5 / 7, -2.0 / 7]


@pytest.mark.parametrize(("length_penalty", "best"), [(0.0, ()), (3.0, (1, 1, 1, 1))])
def test_a_length_penalty_weighs_what_ended(length_penalty: float, best: tuple[int, ...]) -> None:
    _, choices = search({1: -0.5, 0: -1.0, 2: -6.0}, 4, length_penalty=length_penalty)
    assert choices[0].token_ids == best
    assert choices[0].finish_reason == ("length" if best else "stop")


def test_enough_finished_sequences_may_end_the_search() -> None:
    continuations = {1: -0.5, 0: -1.0, 2: -6.0, 3: -7.0}
    assert len(search(continuations, 9)[0]) == 9
    rounds, choices = search(continuations, 9, early_stopping=True)
    assert len(rounds) == 2
    assert [one.finish_reason for one in choices] == ["length", "stop"]


# -- mistakes ------------------------------------------------------------------------------------

HEAD = """\
model: llama-3.1-8b
workload:
  synthetic: {num_requests: 2}
  decoding: """


@pytest.mark.parametrize(
    ("text", "column", "path", "part"),
    [
        ("{kind: best_of, best_of: 4}", 20, "kind", "needs executor.kind real"),
        ("{kind: parallel, n: 0}", 33, "n", "at least 1"),
        ("{kind: beam_search, n: 4}", 3, "beam_width", "is required"),
        (
            "{kind: beam_search, beam_width: 2, fork_probability: 2}",
            66,
            "fork_probability",
            "at mo",
        ),
        ("{kind: beams}", 20, "kind", "beam_search"),
    ],
)
def test_a_mistake_is_named_where_it_stands(
    tmp_path: Path, text: str, column: int, path: str, part: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(HEAD + text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    problem = caught.value.problems[0]
    assert (problem.line, problem.column) == (4, column), str(caught.value)
    assert problem.path == f"workload.decoding.{path}"
    assert part in problem.message


def test_turns_quote_answers_that_are_known(tmp_path: Path) -> None:
    beams = {"kind": "beam_search", "beam_width": 2}
    sessions = {"num_sessions": 2, "turns": {"kind": "constant", "value": 2}}
    with pytest.raises(ConfigError, match="does not go with sessions"):
        load_config(config({"synthetic": {"sessions": sessions}, "decoding": beams}))
    path = tmp_path / "trace.jsonl"
    write_trace(path, [asked("a"), asked("b", parent="a")])
    with pytest.raises(ConfigError, match="turns that wait for each other"):
        simserve.run(config({"trace": {"path": str(path)}, "decoding": beams}))


def test_what_no_engine_survives_is_said() -> None:
    loaded = load_config(
        config(alone({"kind": "parallel", "n": 2}), scheduler={"policy": "priority"})
    )
    assert any("same priority and arrival" in warning for warning in loaded.warnings)


def test_answers_that_are_all_the_same_are_said() -> None:
    several = alone({"kind": "best_of", "best_of": 2})
    real = {"kind": "real", "device": "cpu", "tokens": "sampled"}
    drawn = {**real, "sampling": [{"temperature": 0}, {"top_p": 0.9}]}
    greedy, mixed = (load_config(config(several, executor=one)).warnings for one in (real, drawn))
    assert any("all sequences of a request are the same" in one for one in greedy)
    assert not mixed


def test_a_method_has_bounds() -> None:
    with pytest.raises(ValueError, match="n must be at least 1"):
        Parallel(n=0)
    with pytest.raises(ValueError, match="fork_probability must be from 0 to 1"):
        DrawnForks(beam_width=2, fork_probability=1.5)
    with pytest.raises(TraceError, match="leave out one"):
        ByClass(methods={}, others=Parallel()).open(asked(n=2))
