"""What users get wrong, and exactly what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from simserve.config.loader import load_config
from simserve.errors import ConfigError

VALID = "model: llama-3.1-8b\nworkload:\n  synthetic: {num_requests: 10}\n"

MISTAKES = [
    # what is added to VALID (from line 4 on), line, column, path, part of the message
    (
        "  decoding: {kind: best_of, best_of: 3, length_penalty: 1000}\n",
        4,
        57,
        "workload.decoding.length_penalty",
        "at most",
    ),
    (
        "scheduler:\n  max_num_seq: 8\n",
        5,
        3,
        "scheduler.max_num_seq",
        "did you mean 'max_num_seqs'?",
    ),
    ("max_num_seqs: 8\n", 4, 1, "max_num_seqs", "'max_num_seqs' belongs under scheduler"),
    ("max_num_seq: 8\n", 4, 1, "max_num_seq", "did you mean 'scheduler.max_num_seqs'?"),
    ("schedular: {}\n", 4, 1, "schedular", "did you mean 'scheduler'?"),
    ("kv_cache: {gpu: h100}\n", 4, 12, "kv_cache.gpu", "'gpu' belongs at the top level"),
    ("kv_cache: {on_bad_row: drop}\n", 4, 12, "kv_cache.on_bad_row", "belongs under workload"),
    ("scheduler: {max_num_seqs: 8, max_num_seqs: 9}\n", 4, 30, "scheduler.max_num_seqs", "line 4"),
    ("model: llama-3-8b\n", 4, 1, "model", "this key stands already on line 1"),
    ("scheduler: {max_num_seqs: '8'}\n", 4, 27, "scheduler.max_num_seqs", "not the text '8'"),
    ("scheduler: {max_num_seqs: 8.5}\n", 4, 27, "scheduler.max_num_seqs", "whole number, not 8.5"),
    ("scheduler: {max_num_seqs: true}\n", 4, 27, "scheduler.max_num_seqs", "number, not true"),
    ("scheduler: {max_num_seqs: 0}\n", 4, 27, "scheduler.max_num_seqs", "at least 1, not 0"),
    ("scheduler: {max_num_seqs: [8]}\n", 4, 13, "scheduler.max_num_seqs", "not a list"),
    ("scheduler: vllm\n", 4, 12, "scheduler", "must be a mapping, not the text 'vllm'"),
    ("scheduler: {policy: prio}\n", 4, 21, "scheduler.policy", "did you mean 'priority'?"),
    ("scheduler: {kind: saratti}\n", 4, 19, "scheduler.kind", "did you mean 'sarathi'?"),
    (
        "scheduler: {compat: 0.33}\n",
        4,
        21,
        "scheduler.compat",
        "must be one of 0.11.0, 0.20.2, not 0.33",
    ),
    ("gpu: h20\n", 4, 6, "gpu", "did you mean 'h200'?"),
    ("gpu:\n", 4, 5, "gpu", "must be text, not empty"),
    ("kv_cache: {num_gpu_blocks: 1}\n", 4, 28, "kv_cache.num_gpu_blocks", "at least 2, not 1"),
    ("kv_cache: {num_gpu_blocks: aut}\n", 4, 28, "kv_cache.num_gpu_blocks", "must be auto"),
    (
        "kv_cache: {gpu_memory_utilization: 90}\n",
        4,
        36,
        "kv_cache.gpu_memory_utilization",
        "most 1",
    ),
    ("kv_cache: {groups: []}\n", 4, 12, "kv_cache.groups", "at least 1 entry"),
    (
        "kv_cache: {groups: [{window: 8}]}\n",
        4,
        21,
        "kv_cache.groups.0",
        "type: full, sliding_window",
    ),
    ("kv_cache: {dtype: fp8_e4m}\n", 4, 19, "kv_cache.dtype", "did you mean 'fp8_e4m3'?"),
    ("executor: {cost: {}}\n", 4, 12, "executor.cost", "needs a kind: formula, roofline, profile"),
    (
        "executor: {cost: {kind: rofline}}\n",
        4,
        25,
        "executor.cost.kind",
        "did you mean 'roofline'?",
    ),
    ("executor: {cost: {kind: formula}}\n", 4, 12, "executor.cost.base_s", "is required"),
    ("executor: {kind: reel}\n", 4, 18, "executor.kind", "did you mean 'real'?"),
    ("executor: {device: cpu}\n", 4, 12, "executor.device", "goes with another kind"),
    ("metrics: {percentiles: [50, 101]}\n", 4, 29, "metrics.percentiles.1", "at most 100, not 101"),
    ("metrics: {percentiles: 99}\n", 4, 24, "metrics.percentiles", "must be a list, not 99"),
    ("metrics: {goodput: {ttf: 500}}\n", 4, 21, "metrics.goodput.ttf", "did you mean 'ttft'?"),
    ("metrics: {plot: off}\n", 4, 17, "metrics.plot", "write false"),
    (
        "scheduler:\n  enable_chunked_prefill: 'no'\n",
        5,
        27,
        "scheduler.enable_chunked_prefill",
        "text",
    ),
    ("seed: 017\n", 4, 7, "seed", "write 17"),
    ("seed: 22:30\n", 4, 7, "seed", "plain number in the key's unit"),
    ("seed: 1_000\n", 4, 7, "seed", "write 1000"),
    ("seed: -1\n", 4, 7, "seed", "must be at least 0, not -1"),
    ("seed: .inf\n", 4, 7, "seed", "not a finite number"),
    ("seed: !!int 5\n", 4, 7, "seed", "tag"),
    ("metadata: {<<: {a: 1}}\n", 4, 12, "metadata", "merge keys"),
    ("metadata: {[a]: 1}\n", 4, 12, "metadata", "a key must be plain text"),
    ("metadata: {a: &x [*x]}\n", 4, 19, "metadata.a.0", "contains itself"),
    ("metadata: {a: *x}\n", 4, 15, "metadata.a", "no anchor &x"),
    ("---\nseed: 1\n", 4, 1, "", "second document"),
    ("\tseed: 1\n", 4, 1, "", "not YAML"),
    ("executor: {cost: {kind: formula, base_s: 1e-320}}\n", 4, 12, "executor.cost", "too small"),
    ("seed: [1\n", 5, 1, "", "not YAML"),
    ("seed: \x07\n", 4, 7, "", "not allowed"),
    (
        "scheduler: {max_num_batched_tokens: 64, max_num_seqs: 128}\n",
        4,
        37,
        "scheduler.max_num_batched_tokens",
        "must be at least max_num_seqs (128), not 64",
    ),
    (
        "scheduler: {async_scheduling: true,\n"
        "  speculative: {method: ngram, num_speculative_tokens: 2, acceptance: 0.5}}\n",
        4,
        1,
        "scheduler",
        "does not go with speculative decoding",
    ),
]


@pytest.mark.parametrize(("added", "line", "column", "path", "part"), MISTAKES)
def test_a_mistake_is_named_where_it_stands(
    tmp_path: Path, added: str, line: int, column: int, path: str, part: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(VALID + added)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.column) == (str(file), line, column)
    assert problem.path == path
    assert part in problem.message


WORKLOADS = [
    ("workload: {}", 2, 1, "workload", "needs either trace or synthetic"),
    ("workload: {trace: {path: a}, synthetic: {}}", 2, 1, "workload", "not both"),
    ("workload: {trace: {}}", 2, 12, "workload.trace", "needs either path or name"),
    ("workload: {trace: {path: a, name: burstgpt}}", 2, 12, "workload.trace", "not both"),
    ("workload: {trace: {name: burst}}", 2, 26, "workload.trace.name", "mean 'burstgpt'?"),
    ("workload: {trace: {path: a, format: azur}}", 2, 37, "workload.trace.format", "'azure'?"),
    ("workload: {trace: {path: a, speedup: 0}}", 2, 38, "workload.trace.speedup", "greater than 0"),
    ("workload: {trace: {path: a, start_s: 5, end_s: 5}}", 2, 12, "workload.trace", "not after"),
    ("workload: {synthetic: {rate: 8}}", 2, 24, "workload.synthetic.rate", "synthetic.arrival"),
    (
        "workload: {synthetic: {arrival: {kind: poison, rate: 8}}}",
        2,
        40,
        "workload.synthetic.arrival.kind",
        "did you mean 'poisson'?",
    ),
    (
        "workload: {synthetic: {arrival: {rate: 8}}}",
        2,
        24,
        "workload.synthetic.arrival",
        "needs a kind: immediate, constant, poisson, gamma, bursts, ramp",
    ),
    (
        "workload: {synthetic: {prompt_len: {kind: uniform, min: 9, max: 8}}}",
        2,
        24,
        "workload.synthetic.prompt_len",
        "max (8) is smaller than min (9)",
    ),
    (
        "workload: {synthetic: {output_len: {kind: constant, valu: 8, value: 9}}}",
        2,
        53,
        "workload.synthetic.output_len.valu",
        "did you mean 'value'?",
    ),
    (
        "workload: {synthetic: {classes: [{name: a}, {name: a}]}}",
        2,
        12,
        "workload.synthetic",
        "two classes are called 'a'",
    ),
    (
        "workload: {synthetic: {num_requests: 3, classes: [{name: a, count: 4}]}}",
        2,
        12,
        "workload.synthetic",
        "counts make 4",
    ),
]


@pytest.mark.parametrize(("workload", "line", "column", "path", "part"), WORKLOADS)
def test_a_mistake_in_the_workload(
    tmp_path: Path, workload: str, line: int, column: int, path: str, part: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"model: llama-3.1-8b\n{workload}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.path) == (line, column, path)
    assert part in problem.message


def test_all_mistakes_at_once_with_source_and_caret(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: llama-3.1-8b\n"
        "scheduler:\n"
        "  max_num_batched_token: 4096  # typo\n"
        "  max_num_seqs: 1e-3\n"
        "  enable_chunked_prefill: off\n"
        "seed: 010\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == (
        f"{file}:1:1: workload: is required\n"
        "     1 | model: llama-3.1-8b\n"
        "       | ^\n"
        f"{file}:3:3: scheduler.max_num_batched_token: unknown key"
        " (did you mean 'max_num_batched_tokens'?)\n"
        "     3 |   max_num_batched_token: 4096  # typo\n"
        "       |   ^\n"
        f"{file}:4:17: scheduler.max_num_seqs: must be a whole number, not 0.001\n"
        "     4 |   max_num_seqs: 1e-3\n"
        "       |                 ^\n"
        f"{file}:5:27: scheduler.enable_chunked_prefill: off is a boolean to some readers:"
        " write false, or 'off' for text\n"
        "     5 |   enable_chunked_prefill: off\n"
        "       |                           ^\n"
        f"{file}:6:7: seed: 010 is octal to some readers: write 10, or '010' for text\n"
        "     6 | seed: 010\n"
        "       |       ^"
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "line", "part"),
    [
        (b"", None, "is empty"),
        (b"# nothing\n", None, "is empty"),
        (b"- model\n", 1, "must be a mapping"),
        (b"llama\n", 1, "must be a mapping"),
        (b"!x {model: a}\n", 1, "the tag !x is not allowed"),
        (b"model: a\nlabel: caf\xe9\n", 2, "0xe9 is not UTF-8"),
        (b"\xff\xfem\x00", 1, "0xff is not UTF-8"),
        (b"metadata: " + b"[" * 500 + b"]" * 500, 1, "64 levels"),
        (b"metadata:\n" + b"".join(b" " * i + b"- \n" for i in range(1, 90)), None, "64 levels"),
        (b"metadata: " + b"[" * 50_000, 1, "not YAML"),
    ],
)
def test_a_file_that_is_no_configuration(
    tmp_path: Path, content: bytes, line: int | None, part: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    problem = caught.value.problems[0]
    assert problem.file == str(file)
    assert line is None or problem.line == line
    assert part in problem.message


def test_aliases_that_multiply_are_stopped(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    file = tmp_path / "c.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 100000 values"):
        load_config(file)


def test_aliases_that_nest_are_stopped(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [[[[*a{i - 1}]]]]" for i in range(1, 40)]
    file = tmp_path / "c.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 64 levels"):
        load_config(file)


@pytest.mark.parametrize(("name", "part"), [("none.yaml", "no such file"), (".", "directory")])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load_config(tmp_path / name)


def test_a_name_with_a_null_byte() -> None:
    with pytest.raises(ConfigError, match="null"):
        load_config("a\0b")
