"""What does not go together in decoding and sampling is named where it stands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simserve.config.build import build
from simserve.config.build_workload import build_workload
from simserve.config.dump import dump_config
from simserve.config.loader import load_config
from simserve.config.trace_sampling import own_sampling
from simserve.errors import ConfigError, SimserveError
from simserve.sampling import RequestSampling

HEAD = "model: llama-3.2-1b\ngpu: h200\nkv_cache: {num_gpu_blocks: 100}\n"
SINGLE = "workload: {synthetic: {num_requests: 2}}\n"
BEAMS = "workload: {synthetic: {num_requests: 2}, decoding: {kind: beam_search, beam_width: 4}}\n"
DRAFTS = "scheduler: {speculative: {method: ngram, num_speculative_tokens: 2, acceptance: 0.5}}\n"


def sampled(settings: str, **keys: object) -> str:
    """A real executor whose requests take one entry of settings."""
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    return f"executor: {{kind: real, tokens: sampled, sampling: [{{{settings}}}]{more}}}\n"


def synthetic(*, classes: str = "", decoding: str = "", **keys: str) -> str:
    inner = "".join(f", {key}: {value}" for key, value in keys.items())
    inner += f", classes: [{{name: a{classes}}}]" if classes else ""
    outer = f", decoding: {{{decoding}}}" if decoding else ""
    return f"workload: {{synthetic: {{num_requests: 2{inner}}}{outer}}}\n"


def own_cost(name: str, options: str = "{}") -> str:
    return f"executor: {{cost: {{kind: '{__name__}:{name}', options: {options}}}}}\n"


class BareCost:
    price = None


class FlatCost(BareCost):
    def __init__(self, model: object, gpu: object, *, step_s: float, name: str = "") -> None:
        if step_s < 0:
            raise ConfigError("a step takes time")


class NamelessCost(BareCost):
    def __init__(self, model: object, gpu: object, step_s: float, /) -> None: ...


class AnyCost(BareCost):
    def __init__(self, model: object, gpu: object, **more: object) -> None:
        assert not more


WRONG = {
    "no token may be chosen": (SINGLE + sampled("allowed_token_ids: []"), "at least 1 entry"),
    "an empty word": (SINGLE + sampled("bad_words: [[]]"), "bad_words.0: must have at least 1"),
    "a token without number": (SINGLE + sampled("logit_bias: {x: 1}"), "whole number, not the tex"),
    "a class's unknown token": (
        synthetic(classes=", sampling: {stop_token_ids: [128256]}"),
        "classes.0.sampling.stop_token_ids: 128256 is no token of llama-3.2-1b",
    ),
    "words leave nothing": (
        SINGLE + sampled("allowed_token_ids: [4], bad_words: [[4]]"),
        "bad_words: leave none of allowed_token_ids",
    ),
    "words leave nothing of what an entry allows": (
        synthetic(classes=", sampling: {bad_words: [[4], [7]]}")
        + "executor: {sampling: [{top_p: 0.9}, {allowed_token_ids: [4]}]}\n",
        "classes.0.sampling.bad_words: with executor.sampling.1, bad_words: leave none of allowed",
    ),
    "an entry's words leave nothing": (
        synthetic(classes=", sampling: {allowed_token_ids: [4]}") + sampled("bad_words: [[4]]"),
        "classes.0.sampling.allowed_token_ids: with executor.sampling.0, bad_words: leave none of",
    ),
    "words and ends leave nothing": (
        SINGLE + sampled(
            "allowed_token_ids: [4, 6], bad_words: [[6]], stop_token_ids: [4], min_tokens: 3"
        ),
        "min_tokens: all of allowed_token_ids that bad_words leave end a request",
    ),
    "a bias that masks": (
        SINGLE + sampled("logit_bias: {7: -101}"),
        "logit_bias.7: must be at least -100",
    ),
    "only ends are left": (
        SINGLE + sampled("allowed_token_ids: [4], stop_token_ids: [4, 5], min_tokens: 3"),
        "min_tokens: all of allowed_token_ids end a request",
    ),
    "more than the constant output": (
        synthetic(output_len="{kind: constant, value: 5}") + sampled("min_tokens: 6"),
        "min_tokens: 6 is more than the 5 tokens of the shortest output",
    ),
    "more than the shortest output": (
        synthetic(output_len="{kind: uniform, min: 3, max: 9}") + sampled("min_tokens: 4"),
        "4 is more than the 3 tokens",
    ),
    "more than the shortest of a list": (
        synthetic(output_len="{kind: empirical, values: [9, 2]}") + sampled("min_tokens: 4"),
        "4 is more than the 2 tokens",
    ),
    "more than a class puts out": (
        synthetic(classes=", output_len: {kind: constant, value: 5}, sampling: {min_tokens: 6}"),
        "classes.0.sampling.min_tokens: 6 is more than the 5 tokens",
    ),
    "more logprobs than there is room for": (
        SINGLE + sampled("logprobs: 5", max_logprobs=1),
        r"sampling.0.logprobs: 5 is more than executor.max_logprobs \(1\)",
    ),
    "an end that is no token": (
        synthetic(decoding="kind: beam_search, beam_width: 4, eos_token_id: 128256") + sampled(""),
        "decoding.eos_token_id: 128256 is no token: llama-3.2-1b has 128256",
    ),
    "an end of a class that is no token": (
        synthetic(classes=", decoding: {kind: beam_search, beam_width: 4, eos_token_id: 200000}")
        + sampled(""),
        "classes.0.decoding.eos_token_id: 200000 is no token",
    ),
    "an end where nothing is chosen": (
        synthetic(decoding="kind: beam_search, beam_width: 4, eos_token_id: 5"),
        "eos_token_id: has no effect where no tokens are chosen",
    ),
    "a score where nothing is chosen": (
        synthetic(decoding="kind: beam_search, beam_width: 4, length_penalty: 2.0"),
        "length_penalty: has no effect where no tokens are chosen",
    ),
    "beams of allowed tokens": (
        BEAMS + sampled("allowed_token_ids: [1, 2]"),
        "allowed_token_ids: has no effect with beam_search",
    ),
    "beams with top-p": (BEAMS + sampled("top_p: 0.9"), "top_p: has no effect with beam_search"),
    "beams with logprobs": (BEAMS + sampled("logprobs: 2"), "logprobs: has no effect with beam"),
    "beams of a class with words": (
        synthetic(classes=", decoding: {kind: beam_search, beam_width: 2}, "
                  "sampling: {temperature: 0, bad_words: [[3]]}") + sampled(""),
        "classes.0.sampling.bad_words: has no effect with beam_search",
    ),
    "a price of drafts": (
        SINGLE + DRAFTS + "executor: {sampling: [{top_p: 0.9}]}\n",
        "verify drafts .* was not measured",
    ),
    "asynchronous, of another kind": (
        SINGLE + "scheduler: {kind: sjf, async_scheduling: true}\n",
        "scheduler.async_scheduling: kind vllm has it",
    ),
    "a scheduler that is not there": (
        SINGLE + "scheduler: {kind: 'no_module_of_mine:X'}\n",
        "scheduler.kind: cannot load .*; modules are looked for in the current directory, beside",
    ),
    "a scheduler by its path": (
        SINGLE + "scheduler: {kind: './lifo:X'}\n",
        r"scheduler.kind: './lifo:X' is not 'module:Class': .*\(the file ./lifo.py without",
    ),
    "a cost model by its path": (
        SINGLE + "executor: {cost: {kind: './lifo:X'}}\n",
        "executor.cost.kind: './lifo:X' is not 'module:Class'",
    ),
    "a profile that is not there": (
        SINGLE + "executor: {cost: {kind: profile, name: h200-lama}}\n",
        "executor.cost.name: no profile is called 'h200-lama'",
    ),
    "a profile's file that is not there": (
        SINGLE + "executor: {cost: {kind: profile, path: none.json}}\n",
        "executor.cost.path: .*none.json: cannot read",
    ),
    "options that a class of one's own has not": (
        SINGLE + own_cost("FlatCost", options="{step: 1}"),
        r"executor.cost.options.step: \S+FlatCost has no such option \(did you mean 'step_s'\?\); "
        r"it has step_s, name\n.*\n.*\^\n.* executor.cost.options: \S+FlatCost needs step_s",
    ),
    "an option named as what a class is given anyway": (
        SINGLE + own_cost("AnyCost", options="{b: 1, gpu: h100}"),
        r"executor.cost.options.gpu: \S+AnyCost has no such option; it has none",
    ),
    "an option that a class of one's own refuses": (
        SINGLE + own_cost("FlatCost", options="{step_s: -1}"),
        "executor.cost.options: a step takes time",
    ),
    "a class that takes no GPU": (
        SINGLE + own_cost("BareCost"),
        "executor.cost.kind: .*BareCost cannot be made of a model and a GPU: too many positional",
    ),
    "a class that takes something without a name": (
        SINGLE + own_cost("NamelessCost", options="{step_s: 1}"),
        "executor.cost.kind: .*NamelessCost cannot be .*missing a required .*argument: 'step_s'",
    ),
    "an option that is nearly a number": (
        SINGLE + "scheduler: {kind: sjf, options: {\"²\": 1}}\n",
        "scheduler.options.²: sjf has no such option",
    ),
    "a trace that is not there": (
        "workload: {trace: {path: none.jsonl}}\n",
        "workload.trace.path: .*none.jsonl: there is no such file",
    ),
    "a file of acceptance that is not there": (
        SINGLE + DRAFTS.replace("acceptance: 0.5", "acceptance_file: none.json"),
        "acceptance_file: .*none.json cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_configuration_is_refused_where_it_is_wrong(tmp_path: Path, case: str) -> None:
    text, message = WRONG[case]
    file = tmp_path / "c.yaml"
    file.write_text(HEAD + text)
    with pytest.raises(SimserveError, match=rf"c\.yaml:\d+:\d+: .*{message}"):
        build(load_config(file), 0)


def test_an_entry_is_for_those_that_it_concerns(tmp_path: Path) -> None:
    """Others than beams, and those that do not say themselves how long they are."""
    classes = (
        "[{name: a, decoding: {kind: beam_search, beam_width: 2}, sampling: {temperature: 0}},"
        " {name: b, output_len: {kind: constant, value: 3}, sampling: {min_tokens: 2}}]"
    )
    workload = f"workload: {{synthetic: {{num_requests: 2, classes: {classes}}}}}\n"
    file = tmp_path / "c.yaml"
    file.write_text(HEAD + workload + sampled("top_p: 0.9, min_tokens: 5"))
    assert load_config(file)


def test_what_is_written_out_is_read_back_as_it_was(tmp_path: Path) -> None:
    """Defaults that nobody has said are no settings, neither of classes nor of entries."""
    classes = (
        "[{name: a, decoding: {kind: beam_search, beam_width: 2}}, {name: b, sampling: {seed: 1}}]"
    )
    workload = f"workload: {{synthetic: {{num_requests: 2, classes: {classes}}}}}\n"
    file = tmp_path / "c.yaml"
    file.write_text(HEAD + workload + "executor: {sampling: [{temperature: 0.5, top_p: 0.9}]}\n")
    once = load_config(file).config
    (tmp_path / "again.yaml").write_text(dump_config(once))
    again = load_config(tmp_path / "again.yaml").config
    assert again == once
    assert [one.given for one in again.workload.samplings.values()] == [{"seed": 1}]
    assert again.executor.sampling[0].given == {"temperature": 0.5, "top_p": 0.9}


ROWS: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "two that say how many": (
        [{}, {"n": 2}],
        ", decoding: {kind: parallel, n: 2}",
        "n: is 2, but workload.decoding says",
    ),
    "the id of a sequence": (
        [{"request_id": "a", "n": 2}, {"request_id": "1_a"}],
        "",
        r"request_id: '1_a' is what one of the sequences of 'a' \(n\) is called",
    ),
    "a sequence of an id": (
        [{"request_id": "1_a"}, {"request_id": "a", "n": 2}],
        "",
        "n: one of the 2 sequences is called '1_a', as is a row above",
    ),
    "a token that is none": ([{}, {"sampling": {"stop_token_ids": [128256]}}], "", ".*no token of"),
    "no token": (
        [{}, {"sampling": {"allowed_token_ids": [4], "bad_words": [[4]]}}],
        "",
        "sampling.bad_words: leave none of allowed_token_ids",
    ),
    "beams": (
        [{}, {"sampling": {"top_k": 4}}],
        ", decoding: {kind: beam_search, beam_width: 2}",
        "sampling.top_k: has no effect with beam_search",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_row_is_refused_where_it_is_wrong(tmp_path: Path, case: str) -> None:
    rows, more, message = ROWS[case]
    plain = {"arrival_s": 0, "prompt_len": 9, "output_len": 4}
    lines = [json.dumps({"request_id": f"r{i}", **plain, **row}) for i, row in enumerate(rows)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    file = tmp_path / "c.yaml"
    file.write_text(f"{HEAD}workload: {{trace: {{path: t.jsonl}}{more}}}\n{sampled('')}")
    loaded = load_config(file)
    with pytest.raises(SimserveError, match=rf"t\.jsonl:2: {message}"):
        (build_workload(loaded, 0), own_sampling(loaded, ()))


def test_all_tokens_may_be_forbidden_together() -> None:
    """Of three tokens: by words, by ends, by the end of a sequence, or by some of each."""
    words = RequestSampling(bad_words=((0,), (1,), (2, 1), (2,)))
    assert words.contradiction(3) == ("bad_words", "leave none of the vocabulary")
    assert words.contradiction(4) is None
    ends = RequestSampling(stop_token_ids=(0, 1), min_tokens=1, ignore_eos=False)
    assert ends.contradiction(3, (2,)) is not None
    assert ends.contradiction(3) is None
    assert replace(ends, ignore_eos=True).contradiction(3, (2,)) is None
    assert replace(ends, min_tokens=0).contradiction(3, (2,)) is None
    assert replace(ends, stop_token_ids=(0,), bad_words=((1,),)).contradiction(3, (2,)) is not None


def test_a_row_leaves_a_token_of_what_its_entry_allows(tmp_path: Path) -> None:
    plain = {"arrival_s": 0, "prompt_len": 9, "output_len": 4}
    rows: list[dict[str, Any]] = [{"request_id": name, **plain} for name in "ab"]
    rows[1]["sampling"] = {"min_tokens": 2}
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "c.yaml"
    entry = sampled("allowed_token_ids: [128001], ignore_eos: false")
    file.write_text(f"{HEAD}workload: {{trace: {{path: t.jsonl}}}}\n{entry}")
    loaded = load_config(file)
    assert len(own_sampling(loaded, ())) == 1
    message = (
        "t.jsonl:2: sampling.min_tokens: with executor.sampling.0, min_tokens: all of "
        "allowed_token_ids end a request"
    )
    with pytest.raises(SimserveError, match=message):
        own_sampling(loaded, (128001,))


def test_a_shorter_output_has_fewer_tokens_at_least(tmp_path: Path) -> None:
    row = {"request_id": "a", "arrival_s": 0, "prompt_len": 9, "output_len": 8}
    (tmp_path / "t.jsonl").write_text(json.dumps({**row, "sampling": {"min_tokens": 5}}))
    file = tmp_path / "c.yaml"
    file.write_text(f"{HEAD}workload: {{trace: {{path: t.jsonl, max_osl: 3}}}}\n")
    request = build_workload(load_config(file), 0).source.take()
    assert request.output_len == 3
    assert request.sampling == {"min_tokens": 3}
