"""Beam search and the best of several on a model: what a plain search over full logits finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pq = pytest.importorskip("pyarrow.parquet")

from simserve import api  # noqa: E402
from simserve.config.build_real import open_machine  # noqa: E402
from simserve.config.loader import LoadedConfig, load_config  # noqa: E402
from simserve.metrics.result import RunResult  # noqa: E402
from simserve.metrics.rundir import read_run  # noqa: E402
from simserve.segments import tokens  # noqa: E402
from tests.executor.decoders import ContiguousAttention, tiny_config  # noqa: E402
from tests.executor.test_real_schedules import sharpen  # noqa: E402

PROMPT_LEN, OUTPUT_LEN = 13, 7
BEAMS = {"kind": "beam_search", "beam_width": 3, "eos_token_id": 5, "length_penalty": 2.0}


def load(folder: Path, decoding: dict[str, Any], *overrides: str, **model: int) -> LoadedConfig:
    (folder / "config.json").write_text(json.dumps(tiny_config("llama", **model)))
    synthetic = {
        "num_requests": 2,
        "arrival": {"kind": "immediate"},
        "prompt_len": {"kind": "constant", "value": PROMPT_LEN},
        "output_len": {"kind": "constant", "value": OUTPUT_LEN},
    }
    config = {
        "model": {"config": "config.json"},
        "workload": {"synthetic": synthetic, "decoding": decoding},
        "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_model_len": 64},
        "kv_cache": {"num_gpu_blocks": 40, "block_size": 4},
        "executor": {"kind": "real", "device": "cpu", "dtype": "float64", "tokens": "sampled"},
    }
    return load_config(config, overrides, base_dir=folder)


class Reference:
    """The same model, everything computed again for each token."""

    def __init__(self, machine: Any) -> None:
        self._decoder = machine.decoder
        self._vocab_size = machine.vocab_size
        self._device = machine.rows.ids.device

    def prompt(self, name: str) -> list[int]:
        found: list[int] = tokens(((f"{name}/prompt", PROMPT_LEN),), self._vocab_size).tolist()
        return found

    def logprobs(self, ids: list[int]) -> Any:
        with torch.no_grad(), torch.device(self._device):
            logits = self._decoder.forward(
                torch.tensor(ids),
                torch.arange(len(ids)),
                ContiguousAttention(),
                logits_rows=torch.tensor([len(ids) - 1]),
            )
        return logits[0].double().log_softmax(-1)

    def beam_search(self, name: str, width: int, eos: int, penalty: float) -> list[Any]:
        """(score, output tokens, reason) of the best, over all continuations of every beam."""
        prompt = self.prompt(name)
        beams, ended = [(0.0, prompt)], []
        for _ in range(OUTPUT_LEN):
            found = []
            for total, ids in beams:
                values, tops = self.logprobs(ids).topk(2 * width)
                for value, token in zip(values.tolist(), tops.tolist(), strict=True):
                    if token == eos:
                        ended.append((total + value, ids, "stop"))
                    else:
                        found.append((total + value, [*ids, token]))
            beams = sorted(found, reverse=True)[:width]
        all_found = [*ended, *((total, ids, "length") for total, ids in beams)]
        ranked = [
            (total / len(ids) ** penalty, ids[PROMPT_LEN:], reason)
            for total, ids, reason in all_found
        ]
        return sorted(ranked, reverse=True)[:width]


def run(loaded: LoadedConfig) -> tuple[RunResult, Reference]:
    machine = open_machine(loaded)
    sharpen(machine.decoder)
    result = api.run(loaded, machine=machine)
    assert result.summary_dict["status"] == "completed"
    return result, Reference(machine)


@pytest.mark.parametrize(
    "overrides",
    [(), ("kv_cache.enable_prefix_caching=false", "scheduler.max_num_seqs=2")],
    ids=["shared", "apart, two at a time"],
)
def test_beams_are_those_of_a_plain_search(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    result, reference = run(load(tmp_path, BEAMS, *overrides))
    reasons = set()
    for name in ("r0", "r1"):
        wanted = reference.beam_search(name, width=3, eos=5, penalty=2.0)
        got = [one for one in result.choices if one["request_id"] == name]
        assert [one["index"] for one in got] == [0, 1, 2]
        assert [list(one["token_ids"]) for one in got] == [ids for _, ids, _ in wanted]
        assert [one["score"] for one in got] == pytest.approx([s for s, _, _ in wanted], rel=1e-5)
        assert [one["finish_reason"] for one in got] == [reason for *_, reason in wanted]
        reasons |= {one["finish_reason"] for one in got}
    assert reasons == {"stop", "length"}, "the case shows both kinds of end"
    assert len(result.requests) == 2 * (1 + 3 * (OUTPUT_LEN - 1))
    if not overrides:
        usable = (result.requests["input_length"] - 1) // 4 * 4
        later = result.requests["input_length"] > PROMPT_LEN
        assert (result.requests["cached_tokens"] == usable)[later].all()


@pytest.mark.gpu
def test_beams_on_a_gpu_are_those_of_a_plain_search(tmp_path: Path) -> None:
    dtype = "executor.dtype=float32"
    result, _ = run(load(tmp_path, BEAMS, "executor.device=cuda", dtype, head_dim=64))
    machine = open_machine(load(tmp_path, BEAMS, dtype, head_dim=64))
    sharpen(machine.decoder)
    reference = Reference(machine)
    for name in ("r0", "r1"):
        wanted = reference.beam_search(name, width=3, eos=5, penalty=2.0)
        got = [one for one in result.choices if one["request_id"] == name]
        assert [list(one["token_ids"]) for one in got] == [ids for _, ids, _ in wanted]
        assert [one["score"] for one in got] == pytest.approx([s for s, _, _ in wanted], rel=1e-3)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_the_best_of_several_is_the_likeliest(tmp_path: Path, length_penalty: float) -> None:
    decoding = {"kind": "best_of", "best_of": 4, "length_penalty": length_penalty}
    loaded = load(
        tmp_path, decoding, "executor.sampling=[{temperature: 1.0}]", "metrics.save_detailed=true"
    )
    written = api.run_to_directory(loaded, out=tmp_path / "run")
    outputs = pq.read_table(written.directory / "outputs.parquet").to_pylist()
    choices = read_run(written.directory).choices
    assert [one["request_id"] for one in choices] == ["r0", "r1"]
    for choice in choices:
        siblings = [
            one["logprobs"]
            for one in outputs
            if one["request_id"].partition("_")[2] == choice["request_id"]
        ]
        scores = [sum(one) / len(one) ** length_penalty for one in siblings]
        assert len(set(scores)) == 4
        assert choice["score"] == pytest.approx(max(scores))


def test_siblings_draw_tokens_of_their_own(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        {"kind": "parallel", "n": 5},
        "executor.sampling=[{temperature: 1.0, seed: 7}, {temperature: 0.9, seed: 7}]",
        "metrics.save_detailed=true",
    )
    written = api.run_to_directory(loaded, out=tmp_path / "run")
    rows = pq.read_table(written.directory / "outputs.parquet").to_pylist()
    assert len({tuple(row["output_token_ids"]) for row in rows}) == 2 * 5
    assert not read_run(written.directory).choices


def test_the_next_turn_quotes_what_the_first_sibling_said(tmp_path: Path) -> None:
    sessions = {"num_sessions": 1, "turns": {"kind": "constant", "value": 2}}
    loaded = load(
        tmp_path,
        {"kind": "parallel", "n": 3},
        "workload.synthetic.num_requests=null",
        f"workload.synthetic.sessions={json.dumps(sessions)}",
        "executor.sampling=[{temperature: 1.0}]",
        "metrics.save_detailed=true",
    )
    machine = open_machine(loaded)
    rows = machine.rows
    seen = {}

    def admit(tables: Any, ids: Any, _admit: Any = rows.admit) -> None:
        seen.update({name: found.tolist() for name, found in zip(tables, ids, strict=True)})
        _admit(tables, ids)

    rows.admit = admit  # type: ignore[method-assign]
    result = api.run(loaded, machine=machine)
    quoted = seen["1_s0/t1"][PROMPT_LEN : PROMPT_LEN + OUTPUT_LEN]
    table = result.requests.set_index("request_id")
    # Its prompt and all that it said but the last token, in full blocks of 4.
    assert table.loc["1_s0/t1", "cached_tokens"] >= (PROMPT_LEN + OUTPUT_LEN - 1) // 4 * 4
    made_up = tokens((("s0/t0/output", OUTPUT_LEN),), machine.vocab_size).tolist()
    assert quoted != made_up


def test_dictated_tokens_fork_as_they_are_drawn(tmp_path: Path) -> None:
    beams = {"kind": "beam_search", "beam_width": 3, "fork_probability": 0.5}
    loaded = load(tmp_path, beams, "executor.tokens=replay")
    result, _ = run(loaded)
    assert result.choices == ()
    assert result.summary_dict["group.completed"] == 2
