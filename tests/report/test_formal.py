"""The formal report: whole for runs that this version makes, and honest about what others lack."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner, Result

from simserve.cli.main import app
from simserve.metrics.rundir import read_run

CONFIG = """
model: llama-3.1-8b
gpu: h200
workload:
  synthetic:
    num_requests: 40
    arrival: {kind: poisson, rate: 10}
    prompt_len: {kind: uniform, min: 100, max: 2000}
    output_len: {kind: constant, value: 20}
    shared_prefix: {num_groups: 4, prefix_len: {kind: constant, value: 100}}
kv_cache: {num_gpu_blocks: 700}
metrics: {plot: false}
"""
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "dtype": "float32",
}


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def report(run: Path) -> Result:
    return call("report", run, "--formal")


def made(folder: Path, *overrides: str) -> Path:
    """A run directory as `simserve run` leaves it, with a commit wherever this test runs."""
    folder.mkdir(exist_ok=True)
    (folder / "small.yaml").write_text(CONFIG)
    options = [word for override in overrides for word in ("-o", override)]
    result = call("run", folder / "small.yaml", "--out", folder / "run", "--quiet", *options)
    assert result.exit_code == 0, result.output
    return with_commit(folder / "run")


def with_commit(run: Path) -> Path:
    env = json.loads((run / "env.json").read_text())
    (run / "env.json").write_text(json.dumps({**env, "commit": "0123abc"}))
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("formal") / "whole")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy to take something away from."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def facts(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\* ([^:\n]+): (.*)$", text, re.M))


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


# --- a whole report


def test_a_run_lacks_nothing(whole: Path) -> None:
    result = report(whole)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Nothing that a report should tell is missing." in result.stdout
    told = facts(result.stdout)
    assert told["model"] == "llama-3.1-8b"
    assert told["dtype of weights and activations"] == "bfloat16"
    assert told["dtype of the KV cache"] == "bfloat16"
    assert told["GPU"].startswith("h200, simulated")
    assert told["commit"] == "0123abc"
    assert told["attention backend"] == "none: steps are priced by roofline"
    assert told["start"] == "cold: the prefix cache was empty"
    assert told["warm-up"] == "none"
    assert told["repetitions"] == "1, seed 0"
    assert told["clock"].startswith("virtual")
    assert result.stdout.endswith(f"```yaml\n{(whole / 'config.yaml').read_text()}```\n")


def test_numbers_are_those_of_the_run(whole: Path) -> None:
    text = report(whole).stdout
    told, run = facts(text), read_run(whole)
    summary, requests = run.summary_dict, run.requests
    for metric, title in (("ttft", "TTFT (ms)"), ("itl", "ITL (ms)"), ("e2el", "E2E (ms)")):
        values = [float(str(summary[f"{s}_{metric}_ms"])) for s in ("mean", "p50", "p95", "p99")]
        assert row(text, title) == [f"{value:,.2f}" for value in values]
    lengths = requests["input_length"]
    assert told["prompt tokens"] == f"{lengths.sum():,}"
    assert row(text, "prompt")[-1] == f"{lengths.max():,}"
    assert told["common prefix tokens"] == f"{36 * 100:,}"  # all but the first of each group
    assert told["output tokens"] == f"{40 * 20:,}"
    assert told["hit tokens"].startswith(f"{summary['total_cached_tokens']:,} at first admissions")
    assert told["KV blocks"] == "700 of 16 tokens, the null block included"
    assert told["preemptions"] == str(summary["num_preemptions"])
    assert told["recomputed tokens"] == str(summary["recomputed_tokens"])
    assert told["measuring window"].startswith(f"0.000 s to {summary['duration']:.3f} s")
    slices = re.findall(r"^\| [\d.]+ to [\d.]+ +\| +(\d+) \| +([\d,]+) \|$", text, re.M)
    assert len(slices) == 10
    assert sum(int(count) for count, _ in slices) == 40
    assert sum(int(tokens.replace(",", "")) for _, tokens in slices) == lengths.sum()


def test_throughput_is_counted_by_the_second(whole: Path) -> None:
    text, run = report(whole).stdout, read_run(whole)
    num_windows = int(run.steps["end_s"].max() - run.requests["arrival_time_s"].min())
    assert facts(text)["throughput"].startswith(f"percentiles over {num_windows} windows of 1 s")
    start = run.requests["arrival_time_s"].min()
    edges = start + np.arange(num_windows + 1)
    done, _ = np.histogram(run.requests["ended_s"], edges)
    first = run.requests["first_token_s"]
    prompts, _ = np.histogram(first, edges, weights=run.requests["input_length"])
    output = np.zeros(num_windows)
    for _, request in run.requests.iterrows():
        runs = zip(
            request["token_run_first_step"],
            request["token_run_num_steps"],
            request["token_run_num_tokens"],
            strict=True,
        )
        for step, count, tokens in runs:
            ends = run.steps["end_s"].to_numpy()[step : step + count]
            output += tokens * np.histogram(ends, edges)[0]
    for name, values in (
        ("requests/s", done),
        ("output tokens/s", output),
        ("all tokens/s", prompts + output),
    ):
        expected = np.percentile(values, (50, 95, 99))
        assert row(text, name)[1:] == [f"{value:,.2f}" for value in expected], name


def test_a_measuring_window_and_what_was_before_it(tmp_path: Path) -> None:
    run = made(tmp_path / "window", "metrics.window={start_s: 1.0, end_s: 3.5}")
    text, summary = report(run).stdout, read_run(run).summary_dict
    told = facts(text)
    assert told["measuring window"] == "1.000 s to 3.500 s, as configured"
    assert told["warm-up"].startswith("none; then 1.000 s of load before the measuring window")
    assert told["throughput"].startswith("percentiles over 2 windows")
    assert row(text, "TTFT (ms)")[1] == f"{summary['window.p50_ttft_ms']:,.2f}"
    assert row(text, "requests/s")[0] == f"{summary['window.request_throughput']:,.2f}"


def test_repetitions_have_intervals(tmp_path: Path) -> None:
    run = made(tmp_path / "repeated", "metrics.repetitions=2", "seed=5")
    result = report(run)
    assert result.exit_code == 0
    told, summary = facts(result.stdout), read_run(run).summary_dict
    assert told["repetitions"].startswith("2, seeds 5 to 6, each from a start of its own")
    low, high = summary["p99_ttft_ms_ci95_low"], summary["p99_ttft_ms_ci95_high"]
    assert row(result.stdout, "TTFT (ms)")[3].endswith(f"({low:,.2f} to {high:,.2f})")
    assert told["throughput"].endswith("of the first repetition")


def test_without_a_prefix_cache(tmp_path: Path) -> None:
    run = made(tmp_path / "off", "kv_cache.enable_prefix_caching=false")
    result = report(run)
    assert result.exit_code == 0
    told = facts(result.stdout)
    assert told["hit tokens"] == "none: prefix caching was off"
    assert told["start"] == "cold: there is no prefix cache"
    assert told["common prefix tokens"] == "3,600"


def test_a_trace_is_named_with_its_hash(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    rows = [row, {**row, "timestamp": 1500}, {**row, "timestamp": 1600, "output_length": 0}]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    trace = "workload={trace: {path: ../t.jsonl}, on_bad_row: drop}"
    result = report(made(tmp_path / "traced", trace))
    assert result.exit_code == 0
    told = facts(result.stdout)
    assert re.fullmatch(r"\.\./t\.jsonl, SHA-256 [0-9a-f]{64}, 1 bad rows left out", told["source"])
    assert told["common prefix tokens"] == "512"  # the partial last blocks are their own
    assert told["arrivals asked for"] == "at the times of the source"


def test_it_goes_into_a_file_if_asked(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    result = call("report", whole, "--formal", "--out", out)
    assert result.output == f"report: {out}\n"
    assert out.read_text() == report(whole).stdout


# --- a report that lacks something


def edit_summary(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    (summary,) = json.loads((run / "summary.json").read_text())
    change(summary)
    (run / "summary.json").write_text(json.dumps([summary]))


SUMMARY = [
    "model_id",
    "dtype",
    "kv_cache_dtype",
    "gpu",
    "decisions",
    "timing",
    "num_prompts",
    "max_concurrency",
    "mean_concurrency",
    "request_rate",
    *(f"{p}_{metric}_ms" for metric in ("ttft", "itl", "e2el") for p in ("p50", "p95", "p99")),
    "output_throughput",
    "total_cached_tokens",
    "num_gpu_blocks",
    "max_kv_cache_usage",
    "num_preemptions",
    "recomputed_tokens",
    "status",
    "prefix_cache_at_start",
    "warm_up",
    "clock",
]


@pytest.mark.parametrize("key", SUMMARY)
def test_a_key_of_the_summary_is_missed(run: Path, key: str) -> None:
    edit_summary(run, lambda summary: summary.pop(key))
    lacks(report(run), key)


@pytest.mark.parametrize("key", ["simserve", "commit", "python", "packages"])
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_key_of_the_environment_is_missed(run: Path, key: str, how: str) -> None:
    env = json.loads((run / "env.json").read_text())
    env.pop(key) if how == "absent" else env.update({key: None})
    (run / "env.json").write_text(json.dumps(env))
    lacks(report(run), f"env.json: {key}")


@pytest.mark.parametrize("key", ["workload", "scheduler", "kv_cache", "metrics", "seed"])
def test_a_part_of_the_configuration_is_missed(run: Path, key: str) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config[key]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lacks(report(run), f"config.yaml: {key}")


@pytest.mark.parametrize(
    "column",
    ["arrival_time_s", "input_length", "common_prefix_tokens", "output_length", "ended_s"],
)
def test_a_column_is_missed(run: Path, column: str) -> None:
    path = run / "requests.parquet"
    pq.write_table(pq.read_table(path).drop_columns(column), path)
    lacks(report(run), f"requests.parquet: {column}")


def test_the_clock_of_the_steps_is_missed(run: Path) -> None:
    path = run / "steps.parquet"
    pq.write_table(pq.read_table(path).drop_columns("end_s"), path)
    lacks(report(run), "steps.parquet: end_s")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("env.json", "commit (env.json: commit)"),
        ("config.yaml", "settings of scheduler (config.yaml: scheduler)"),
        ("requests.parquet", "prompt tokens (requests.parquet: input_length)"),
        ("steps.parquet", "throughput p50, p95, p99 (requests.parquet, steps.parquet)"),
    ],
)
def test_a_file_is_missed(run: Path, file: str, says: str) -> None:
    (run / file).unlink()
    lacks(report(run), says)


def lacks(result: Result, what: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("missing: ")
    assert what in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "**Missing: " in result.stdout
    assert what in result.stdout


def test_a_result_of_another_tool_lacks_most(tmp_path: Path) -> None:
    result = {"model_id": "llama", "completed": 5, "duration": 2.0, "p50_ttft_ms": 3.0}
    (tmp_path / "summary.json").write_text(json.dumps([result]))
    shown = report(tmp_path)
    lacks(shown, "commit (env.json: commit)")
    assert facts(shown.stdout)["model"] == "llama"
    assert row(shown.stdout, "TTFT (ms)")[1] == "3.00"


def test_an_interrupted_run_is_no_whole_run(run: Path) -> None:
    edit_summary(run, lambda summary: summary.update(status="interrupted"))
    lacks(report(run), "status is interrupted")


def test_a_run_without_a_whole_second_has_no_throughput_percentiles(tmp_path: Path) -> None:
    run = made(tmp_path / "short", "workload.synthetic.num_requests=1")
    lacks(report(run), "holds no whole second")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: shutil.rmtree(run), "there is no run directory of this name"),
        (lambda run: (run / "summary.json").unlink(), "summary.json: cannot be read"),
        (lambda run: (run / "env.json").write_text("{"), "env.json:1: is not JSON"),
        (lambda run: (run / "sweep.yaml").touch(), "is a sweep; name the directory of one"),
    ],
)
def test_what_is_no_run_directory_is_one_line(
    run: Path, spoil: Callable[[Path], object], says: str
) -> None:
    spoil(run)
    result = report(run)
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.splitlines()) == 1


def test_figures_do_not_go_with_it(run: Path) -> None:
    result = call("report", run, "--formal", "--figures", run / "pictures")
    assert result.exit_code == 2
    assert "does not go with --formal" in result.output


# --- real runs


def test_a_real_run_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = tmp_path / "real.yaml"
    config.write_text(
        "model: {config: config.json}\n"
        "workload: {synthetic: {num_requests: 2, arrival: {kind: constant, rate: 0.5},\n"
        "  prompt_len: {kind: constant, value: 9}, output_len: {kind: constant, value: 3}}}\n"
        "executor: {kind: real, device: cpu}\n"
        "kv_cache: {num_gpu_blocks: 20}\n"
        "metrics: {plot: false}\n"
    )
    result = call("run", config, "--out", tmp_path / "run", "--quiet", "--no-sim")
    assert result.exit_code == 0, result.output
    result = report(with_commit(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    told = facts(result.stdout)
    assert told["dtype of weights and activations"] == "float32"
    assert told["GPU"] == "none: computed on the CPU"
    assert told["attention backend"].startswith("plain torch")
    assert told["steps in which something was compiled"] == "0"
    assert re.fullmatch(r"\d{8}-\d{6}", told["date (UTC)"])


def test_a_real_run_on_a_gpu(run: Path) -> None:
    """The facts that a machine with a GPU adds, written by hand."""
    facts_of_machine = {
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "attention": "auto",
        "kv_layout": "nhd",
        "mixed": "varlen",
    }
    more = {f"executor.{key}": value for key, value in facts_of_machine.items()}
    more |= {"backend": "simserve-real", "clock": "realtime", "date": "20260101-000000"}
    edit_summary(run, lambda summary: summary.update(more))
    lacks(report(run), "GPU driver (env.json: gpu)")
    env = json.loads((run / "env.json").read_text())
    (run / "env.json").write_text(json.dumps({**env, "gpu": "NVIDIA H200, 580.1"}))
    lacks(report(run), "steps.parquet: parts.first_shape")
    steps = pq.read_table(run / "steps.parquet")
    first = [1.0, *[0.0] * (steps.num_rows - 1)]
    pq.write_table(steps.append_column("parts.first_shape", [first]), run / "steps.parquet")
    result = report(run)
    assert result.exit_code == 0
    told = facts(result.stdout)
    assert told["GPU"] == "NVIDIA H200 (name, driver: NVIDIA H200, 580.1)"
    assert told["attention backend"].startswith("simserve_kernels, decodes auto, layout nhd")
    assert told["clock"].startswith("realtime")
    assert told["steps in which something was compiled"] == "1"


def test_text_of_the_configuration_stays_in_its_place(tmp_path: Path) -> None:
    label, note = r'label="a\n## b"', r'metadata={note: "```\n# c\n```"}'
    text = report(made(tmp_path / "odd", label, note)).stdout
    assert text.startswith("# Report of a ## b\n")
    assert "\n````yaml\n" in text
    assert text.endswith("\n````\n")
