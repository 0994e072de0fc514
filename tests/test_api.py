"""The whole of it: from a configuration to a result or a run directory."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import simserve
from simserve import api
from simserve.api import run_to_directory
from simserve.config.loader import load_config
from simserve.errors import (
    ConfigError,
    PluginError,
    RunDirectoryError,
    StalledError,
    TraceError,
)
from simserve.metrics.rundir import read_run
from simserve.metrics.summary import summarise

SMALL: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "h200",
    "workload": {
        "synthetic": {
            "num_requests": 60,
            "arrival": {"kind": "poisson", "rate": 20},
            "prompt_len": {"kind": "lognormal", "mean": 300, "sigma": 0.8, "min": 8, "max": 3000},
            "output_len": {"kind": "uniform", "min": 2, "max": 60},
            "shared_prefix": {"num_groups": 2, "prefix_len": {"kind": "constant", "value": 200}},
        }
    },
    "kv_cache": {"num_gpu_blocks": 700},
    "scheduler": {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 8192},
}
SAME_BYTES = ("config.yaml", "summary.json", "requests.parquet", "steps.parquet")


def config(**changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(SMALL)
    for path, value in changes.items():
        node = made
        *parents, last = path.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return made


def test_a_run_gives_frames_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = simserve.run(SMALL)
    assert len(result.requests) == 60
    assert result.summary["completed"].tolist() == [60]
    assert len(result.steps) == result.summary_dict["num_steps"]
    assert "<table>" in result._repr_html_()
    assert len(repr(result)) < 100
    assert {"run", "RunResult"} <= set(dir(simserve))
    assert list(tmp_path.iterdir()) == []


def test_a_result_pickles() -> None:
    result = simserve.run(SMALL)
    again = pickle.loads(pickle.dumps(result))
    assert again.summary_dict == result.summary_dict
    assert again.requests.equals(result.requests)


def test_a_config_can_be_run_twice() -> None:
    loaded = load_config(SMALL)
    assert simserve.run(loaded).summary_dict == simserve.run(loaded).summary_dict


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheduler__policy": "priority"},
        {"scheduler__async_scheduling": True},
        {
            "scheduler__speculative": {
                "method": "eagle",
                "num_speculative_tokens": 3,
                "acceptance": 0.6,
            }
        },
        {"kv_cache__eviction": "fifo"},
        {"kv_cache__groups": [{"type": "full"}, {"type": "sliding_window", "window": 128}]},
        {"scheduler__kind": "sarathi", "scheduler__options": {"chunk_size": 256}},
        {"scheduler__kind": "sjf"},
        {
            "kv_cache__allocator": "contiguous",
            "kv_cache__enable_prefix_caching": False,
            "kv_cache__num_gpu_blocks": 6001,
        },
        {"executor__cost": {"kind": "formula", "base_s": 0.005, "per_token_s": 2e-5}},
    ],
)
def test_every_built_in_completes_all_requests(changes: dict[str, Any]) -> None:
    summary = simserve.run(config(**changes)).summary_dict
    assert summary["completed"] == summary["num_prompts"] == 60
    output = summary["total_output_tokens"]
    assert output == simserve.run(SMALL).summary_dict["total_output_tokens"]


def test_equal_configurations_give_equal_bytes_under_any_hash_seed(tmp_path: Path) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(SMALL))
    code = "import sys; from simserve.cli.main import main; main()"
    options = ["--quiet", "-o", "metrics.plot=false"]
    for name in ("0", "1"):
        arguments = ["run", str(source), "--out", str(tmp_path / name), *options]
        environment = os.environ | {"PYTHONHASHSEED": name}
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=environment)
    for file in SAME_BYTES:
        assert (tmp_path / "0" / file).read_bytes() == (tmp_path / "1" / file).read_bytes()


def test_a_run_directory_reads_back(tmp_path: Path) -> None:
    written = run_to_directory(load_config(SMALL), out=tmp_path / "run")
    assert written.picture is not None
    assert written.picture.read_bytes().startswith(b"\x89PNG")
    again = read_run(written.directory)
    assert again.summary_dict == dict(written.summary)
    resolved = load_config(written.directory / "config.yaml")
    assert simserve.run(resolved).summary_dict == dict(written.summary)


def test_repetitions_have_seeds_of_their_own_and_intervals() -> None:
    result = simserve.run(config(metrics__repetitions=3))
    seeds = [summary["seed"] for summary in result.repetitions]
    assert seeds == [0, 1, 2]
    means = [float(str(summary["mean_ttft_ms"])) for summary in result.repetitions]
    low, high = (result.summary_dict[f"mean_ttft_ms_ci95_{end}"] for end in ("low", "high"))
    assert min(means) <= float(str(low)) <= float(str(high)) <= max(means)


def test_impossible_requests_are_rejected_and_counted() -> None:
    summary = simserve.run(config(scheduler__max_model_len=600)).summary_dict
    assert summary["rejected"] > 0
    assert summary["completed"] + summary["rejected"] == 60


def test_a_stalled_engine_says_who_waits_for_what(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "kv_cache__num_gpu_blocks": 40,
        "scheduler__on_impossible": "as_engine",
    }
    with pytest.raises(StalledError, match=r"requests can never make progress: r\d+ .*39 usable"):
        run_to_directory(load_config(config(**changes)), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_budget_error_names_the_file(tmp_path: Path) -> None:
    source = tmp_path / "mine.yaml"
    source.write_text(json.dumps(config(scheduler__options={"a": 1})))
    with pytest.raises(
        ConfigError, match=r"mine.yaml:1:\d+: scheduler.options.a: vllm has no such"
    ):
        simserve.run(source)


def test_a_class_without_a_method_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_scheduler.py").write_text("class Half:\n    def schedule(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"half_a_scheduler:Half .* it lacks .*add_request"):
        simserve.run(config(scheduler__kind="half_a_scheduler:Half"))


def test_ctrl_c_finishes_the_directory(tmp_path: Path) -> None:
    long = config(workload__synthetic__num_requests=200_000, metrics__plot=False)
    source = tmp_path / "long.json"
    source.write_text(json.dumps(long))
    code = "from simserve.cli.main import main; main()"
    arguments = ["run", str(source), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "simulated" not in process.stderr.readline():  # the first line of progress
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    summary = read_run(tmp_path / "run").summary_dict
    assert summary["status"] == "interrupted"
    assert summary["completed"] > 0


def test_ctrl_c_in_a_repetition_keeps_the_whole_ones(tmp_path: Path) -> None:
    times = list[float]()

    def press(now_s: float, num_done: int, num_all: int | None) -> None:
        times.append(now_s)
        starts = sum(later < earlier for earlier, later in pairwise(times))
        if starts == 2 and now_s > 1:
            os.kill(os.getpid(), signal.SIGINT)

    loaded = load_config(config(metrics__repetitions=5, metrics__plot=False))
    written = api.run_to_directory(loaded, out=tmp_path / "run", progress=press)
    whole = simserve.run(config(metrics__repetitions=2)).summary_dict
    assert written.summary == {**whole, "status": "interrupted"}
    assert sorted(one.name for one in (tmp_path / "run").glob("run=*")) == [
        "run=0.json",
        "run=1.json",
    ]


@pytest.mark.parametrize("repetition", [0, 1])
def test_ctrl_c_while_numbers_are_made_ends_the_repetitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repetition: int
) -> None:
    calls = list[None]()

    def press(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == repetition + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return summarise(*arguments)

    monkeypatch.setattr(api, "summarise", press)
    loaded = load_config(config(metrics__repetitions=3, metrics__plot=False))
    written = api.run_to_directory(loaded, out=tmp_path / "run")
    assert written.summary["status"] == "interrupted"
    assert len(calls) == repetition + 1
    assert read_run(tmp_path / "run").summary_dict["completed"] == written.summary["completed"]


@pytest.mark.parametrize(
    ("name", "num_requests"),
    [("azure2023_code.csv", 8819), ("burstgpt1_first400.csv", 383)],
)
def test_public_traces_run(traces_dir: Path, name: str, num_requests: int) -> None:
    made = config(kv_cache__num_gpu_blocks="auto", scheduler__max_num_batched_tokens=8192)
    made["workload"] = {"trace": {"path": str(traces_dir / name)}, "on_bad_row": "drop"}
    summary = simserve.run(made).summary_dict
    assert summary["completed"] == summary["num_prompts"] == num_requests
    assert summary["prefix_cache_hits"] == 0  # the trace has no prefix information


def test_a_trace_with_prefixes_hits_near_its_bound(traces_dir: Path) -> None:
    made = config(kv_cache__num_gpu_blocks=4_000_000, scheduler__max_model_len=131072)
    path = str(traces_dir / "mooncake_conversation.jsonl")
    made["workload"] = {"trace": {"path": path, "num_requests": 1500}}
    made["scheduler"]["max_num_batched_tokens"] = 8192
    made["executor"] = {"cost": {"kind": "formula", "base_s": 1e-3}}
    summary = simserve.run(made).summary_dict
    bound = simserve_bound(traces_dir / "mooncake_conversation.jsonl", 1500)
    assert summary["prefix_cache_hit_rate"] == pytest.approx(bound, abs=0.01)


def simserve_bound(path: Path, num_requests: int) -> float:
    """Prompt tokens in blocks seen before, walking each prompt's ids from the front."""
    seen: set[int] = set()
    hits = total = 0
    for line in path.read_text().splitlines()[:num_requests]:
        row = json.loads(line)
        total += row["input_length"]
        for place, block in enumerate(row["hash_ids"]):
            if block not in seen:
                break
            hits += min(512, row["input_length"] - 512 * place)
        seen.update(row["hash_ids"])
    return hits / total


@pytest.mark.parametrize("output_len", range(20, 30))
@pytest.mark.parametrize("method", ["eagle", "ngram"])
def test_requests_with_drafts_complete_or_are_rejected(method: str, output_len: int) -> None:
    made = config(
        scheduler__max_num_seqs=8,
        scheduler__max_num_batched_tokens=8,
        scheduler__speculative={
            "method": method,
            "num_speculative_tokens": 3,
            "acceptance": 0.0,
        },
        kv_cache__num_gpu_blocks=4,
    )
    made["workload"] = {
        "synthetic": {
            "num_requests": 1,
            "prompt_len": {"kind": "constant", "value": 20},
            "output_len": {"kind": "constant", "value": output_len},
        }
    }
    summary = simserve.run(made).summary_dict
    assert summary["completed"] + summary["rejected"] == 1


def test_a_window_shorter_than_the_drafts_is_refused() -> None:
    made = config(
        scheduler__speculative={"method": "ngram", "num_speculative_tokens": 7, "acceptance": 1.0},
        kv_cache__groups=[{"type": "sliding_window", "window": 7}],
    )
    with pytest.raises(ConfigError, match=r"kv_cache.groups: a window of 7 is too short .* 8"):
        simserve.run(made)


def test_a_place_that_cannot_be_written_is_known_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    calls: list[float] = []
    for name in ("file/x", "y" * 300):
        with pytest.raises(RunDirectoryError, match="cannot write there"):
            run_to_directory(
                load_config(SMALL),
                out=tmp_path / name,
                progress=lambda now_s, *_: calls.append(now_s),
            )
    assert calls == []


def test_a_slice_without_requests_is_an_error(tmp_path: Path) -> None:
    trace = tmp_path / "one.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,10,2\n")
    made = config()
    made["workload"] = {"trace": {"path": str(trace), "start_s": 5.0}}
    with pytest.raises(TraceError, match="no requests are left to run"):
        simserve.run(made)
