"""What requests were given is kept: tokens and log-probabilities, under any schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from simserve.errors import ConfigError, TraceError  # noqa: E402
from simserve.executor.real.outcomes import Outcome, Outcomes  # noqa: E402
from simserve.executor.real.weights import load_decoder  # noqa: E402
from simserve.segments import tokens  # noqa: E402
from simserve.types import TraceRequest  # noqa: E402
from tests.executor.decoders import ContiguousAttention  # noqa: E402
from tests.executor.served import Schedule, open_machine, request, serve  # noqa: E402
from tests.executor.test_real_sampling import choice  # noqa: E402
from tests.executor.test_real_schedules import tiny  # noqa: E402

MIXED = (choice(1, temperature=0, logprobs=3), choice(1, temperature=0.8), choice(1, logprobs=0))
REQUESTS = [request(f"r{i}", 0.0, 5 + 3 * i, 6) for i in range(7)]
SCHEDULES = {
    "at once": Schedule(),
    "few at a time": Schedule(max_num_batched_tokens=9, max_num_seqs=3, caching=False),
    "preempted": Schedule(num_gpu_blocks=6, block_size=8),
    "planned ahead": Schedule(plans_ahead=True),
}


def raw_logprobs(one: TraceRequest, output: list[int], head_dim: int = 8) -> Any:
    """Log-softmax of all logits that led to an output, computed at once; `[T, vocab_size]`."""
    shape = tiny(head_dim)
    decoder = load_decoder(shape, seed=0, dtype=torch.float64, device="cpu")
    ids = [*tokens(one.prompt, shape.model.vocab_size).tolist(), *output[:-1]]
    rows = torch.arange(one.prompt_len - 1, len(ids))
    logits = decoder.forward(
        torch.tensor(ids), torch.arange(len(ids)), ContiguousAttention(None), logits_rows=rows
    )
    return logits.float().log_softmax(-1)


def check(one: TraceRequest, outcome: Outcome, wanted: int, head_dim: int = 8) -> None:
    """The log-probabilities of an outcome are those of the model."""
    found = raw_logprobs(one, outcome.token_ids, head_dim)
    assert len(outcome.logprobs) == len(outcome.ranks) == len(outcome.token_ids)
    for row, token, rank, ids, logprobs in zip(
        found, outcome.token_ids, outcome.ranks, outcome.ids, outcome.logprobs, strict=True
    ):
        top = row.topk(wanted)
        assert ids.tolist() == [token, *top.indices.tolist()]
        assert logprobs == pytest.approx(row[ids.tolist()].tolist(), abs=2e-5)
        assert rank == int((row >= row[token]).sum())


@pytest.mark.parametrize("name", SCHEDULES)
def test_logprobs_are_those_of_the_model(name: str) -> None:
    schedule, kept = SCHEDULES[name], []
    machine = open_machine(tiny(), schedule, sampling=MIXED, max_logprobs=3)
    got, data = serve(machine, schedule, REQUESTS, outcomes=Outcomes(kept.append))
    assert (data.requests.num_preemptions.sum() > 0) == (name == "preempted")
    assert {one.request_id: one.token_ids for one in kept} == got
    wanted = {one.request_id: machine.choices.of(one).logprobs for one in REQUESTS}
    assert set(wanted.values()) == {None, 0, 3}, "the requests are to be of all kinds"
    requests = {one.request_id: one for one in REQUESTS}
    for outcome in kept:
        number = wanted[outcome.request_id]
        assert outcome.finish_reason == "length"
        if number is None:
            assert not any((outcome.ranks, outcome.ids, outcome.logprobs))
        else:
            check(requests[outcome.request_id], outcome, number)


@pytest.mark.gpu
def test_logprobs_on_a_gpu_are_those_of_the_model() -> None:
    schedule, kept = Schedule(), []
    machine = open_machine(
        tiny(64), schedule, device="cuda", dtype="float32", sampling=MIXED, max_logprobs=3
    )
    _, data = serve(machine, schedule, REQUESTS, outcomes=Outcomes(kept.append))
    requests = {one.request_id: one for one in REQUESTS}
    for outcome in kept:
        wanted = machine.choices.of(requests[outcome.request_id]).logprobs
        if wanted is not None:
            check(requests[outcome.request_id], outcome, wanted, 64)
    assert not data.steps.parts["first_shape"].any(), "the warm-up compiles everything"


def test_a_request_may_ask_for_itself_and_its_outcome_is_taken_once() -> None:
    """As rounds of a beam search do: one token, and the likeliest ones beside it."""
    schedule, outcomes = Schedule(), Outcomes()
    outcomes.keeps = True
    machine = open_machine(tiny(), schedule, max_logprobs=8)
    asks = [request("a", 0.0, 9, 1, logprobs=8), request("b", 0.0, 9, 4)]
    serve(machine, schedule, asks, outcomes=outcomes)
    outcome = outcomes.take("a")
    check(asks[0], outcome, 8)
    assert outcome.ranks == [1]
    assert outcome.cumulative_logprob == pytest.approx(float(outcome.logprobs[0][0]))
    assert not outcomes.take("b").logprobs
    with pytest.raises(KeyError):
        outcomes.take("a")


def test_more_logprobs_than_there_are_is_one_clear_error() -> None:
    machine = open_machine(tiny(), Schedule(), max_logprobs=2)
    with pytest.raises(TraceError, match=r"request a: logprobs: 3 .*max_logprobs \(2\)"):
        serve(machine, Schedule(), [request("a", 0.0, 9, 1, logprobs=3)])


CONFIG = """\
model: {config: model.json}
gpu: h200
seed: 3
workload:
  synthetic:
    num_requests: 5
    prompt_len: {kind: constant, value: 9}
    output_len: {kind: constant, value: 4}
scheduler: {max_model_len: 64, max_num_seqs: 4, max_num_batched_tokens: 64}
kv_cache: {num_gpu_blocks: 40, block_size: 16}
executor:
  kind: real
  device: cpu
  tokens: sampled
  sampling: [{weight: 1, temperature: 0, logprobs: 2}, {weight: 1}]
metrics: {plot: false, save_detailed: true}
"""


def test_a_run_directory_holds_them_where_they_were_asked_for(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from simserve.api import run_to_directory
    from simserve.config.loader import load_config
    from tests.executor.decoders import tiny_config

    (tmp_path / "model.json").write_text(json.dumps(tiny_config("llama")))
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG)
    run_to_directory(load_config(file), out=tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "outputs.parquet").to_pylist()
    assert len({row["request_id"] for row in rows}) == 5
    asked = [row for row in rows if row["logprobs"]]
    assert 0 < len(asked) < 5
    assert all(len(row["output_token_ids"]) == 4 for row in rows)
    for row in asked:
        assert row["ranks"] == [1] * 4
        assert [top[0] for top in row["top_token_ids"]] == row["output_token_ids"]
        assert [top[0] for top in row["top_logprobs"]] == row["logprobs"]
        assert {len(top) for top in row["top_logprobs"]} == {2}
    run_to_directory(load_config(file, ["metrics.save_detailed=false"]), out=tmp_path / "plain")
    assert not (tmp_path / "plain" / "outputs.parquet").exists()


ROWS = [
    {"sampling": {"temperature": 0, "logprobs": 1}},
    {"sampling": {"temperature": 0, "repetition_penalty": 100.0}},
    {
        "sampling": {
            "allowed_token_ids": [3, 5],
            "logit_bias": {"3": 100},
            "stop_token_ids": [3],
            "min_tokens": 2,
        }
    },
    {},
]


def traced(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str) -> Any:
    from simserve.config.loader import load_config
    from tests.executor.decoders import tiny_config

    config = tiny_config("llama", **({} if "eos" in overrides else {"eos_token_id": 7}))
    (tmp_path / "model.json").write_text(json.dumps(config))
    base = {"arrival_s": 0, "prompt": [["p", 9]], "output_len": 4}
    lines = [json.dumps(base | row | {"request_id": f"r{i}"}) for i, row in enumerate(rows)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    file = tmp_path / "c.yaml"
    head, tail = CONFIG.split("workload:")[0], CONFIG.split("scheduler:")[1]
    file.write_text(f"{head}workload: {{trace: {{path: t.jsonl}}}}\nscheduler:{tail}")
    return load_config(file, [one for one in overrides if one != "eos"])


def test_each_request_of_a_trace_has_what_it_asks_for(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from simserve.api import run_to_directory

    run_to_directory(traced(tmp_path, ROWS, "executor.sampling=[]"), out=tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "outputs.parquet").to_pylist()
    outputs = {row["request_id"]: row for row in rows}
    reasons = pq.read_table(tmp_path / "out" / "requests.parquet", columns=["finish_reason"])
    first, penalised, stopped, plain = (outputs[f"r{i}"]["output_token_ids"] for i in range(4))
    assert first == plain
    assert [len(top) for top in outputs["r0"]["top_token_ids"]] == [1] * 4
    assert outputs["r3"]["logprobs"] == []
    assert len(set(penalised)) == 4
    assert penalised != first
    assert stopped == [5, 5, 3]
    assert reasons.column(0).to_pylist() == ["length", "length", "stop", "length"]


def test_a_class_of_requests_has_what_it_asks_for(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from simserve.api import run_to_directory
    from simserve.config.loader import load_config
    from tests.executor.decoders import tiny_config

    (tmp_path / "model.json").write_text(json.dumps(tiny_config("llama")))
    file = tmp_path / "c.yaml"
    classes = (
        "    classes:\n"
        "      - {name: free, count: 2}\n"
        "      - {name: cut, count: 3, sampling: {logit_bias: {5: 100}, stop_token_ids: [5]}}\n"
    )
    file.write_text(CONFIG.replace("    num_requests: 5\n", classes))
    run_to_directory(load_config(file), out=tmp_path / "out")
    columns = ["class", "finish_reason", "output_length"]
    rows = pq.read_table(tmp_path / "out" / "requests.parquet", columns=columns).to_pylist()
    ends = sorted(tuple(row.values()) for row in rows)
    assert ends == [("cut", "stop", 1)] * 3 + [("free", "length", 4)] * 2


def test_a_class_may_not_forbid_all_but_the_end_of_a_sequence(tmp_path: Path) -> None:
    """Which token that is, the model's file says."""
    from simserve.api import run
    from simserve.config.loader import load_config
    from tests.executor.decoders import tiny_config

    (tmp_path / "model.json").write_text(json.dumps(tiny_config("llama", eos_token_id=7)))
    file = tmp_path / "c.yaml"
    sampling = "{allowed_token_ids: [7], min_tokens: 2, ignore_eos: false}"
    classes = f"    classes: [{{name: a, count: 2, sampling: {sampling}}}]\n"
    file.write_text(CONFIG.replace("    num_requests: 5\n", classes))
    message = r"c.yaml:6:82: .*classes.0.sampling.min_tokens: all of allowed_token_ids end"
    with pytest.raises(ConfigError, match=message):
        run(load_config(file))


@pytest.mark.parametrize(
    ("asked", "overrides", "message"),
    [
        ({"stop_token_ids": [97]}, [], "sampling.stop_token_ids: 97 is no token of"),
        ({"ignore_eos": False}, ["eos"], "sampling.ignore_eos: .* names no eos_token_id"),
        (
            {"min_tokens": 2},
            ["executor.tokens=replay", "executor.sampling=[]"],
            "sampling.min_tokens: has no effect with executor.tokens replay",
        ),
    ],
)
def test_what_a_request_cannot_have_is_one_clear_error(
    tmp_path: Path, asked: dict[str, Any], overrides: list[str], message: str
) -> None:
    from simserve.api import run

    loaded = traced(tmp_path, [{}, {"sampling": asked}], *overrides)
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: {message}"):
        run(loaded)
