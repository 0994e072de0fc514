"""`simserve run` around the simulation: options, progress, tables, exit codes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import simserve
from simserve.cli.main import COMMANDS, app
from simserve.errors import StalledError

SUMMARY: dict[str, Any] = {
    "status": "completed",
    "completed": 1900,
    "rejected": 3,
    "duration": 61.25,
    "num_steps": 4321,
    "request_throughput": 31.0,
    "request_goodput": None,
    "output_throughput": 1234.5,
    "total_token_throughput": 5678.9,
    "prefix_cache_hits": 480,
    "prefix_cache_queries": 1000,
    "total_cached_tokens": 120,
    "total_input_tokens": 600,
    "num_preemptions": 7,
    "decisions": "vllm 0.11.0",
    "timing": "roofline",
    **{
        f"{stat}_{metric}_ms": 10.0 * i + j
        for i, metric in enumerate(("ttft", "itl", "tpot", "e2el", "queue_time"), 1)
        for j, stat in enumerate(("mean", "p50", "p90", "p95", "p99", "p99.9"))
    },
    "p99_tpot_ms": None,
}
CONFIG = "model: llama-3.1-8b\nworkload: {synthetic: {num_requests: 20}}\n"

Invoke = Callable[..., Any]


class FakeApi:
    """Stands for the simulator: notes what it is asked, reports progress, raises if told to."""

    def __init__(self) -> None:
        self.loaded: Any = None
        self.out: Path | None = None
        self.error: BaseException | None = None
        self.summary = dict(SUMMARY)
        self.num_total: int | None = 20
        self.warnings: tuple[str, ...] = ()
        """What came up in the run."""

    def run_to_directory(self, loaded: Any, *, out: Path, progress: Any) -> SimpleNamespace:
        self.loaded, self.out = loaded, out
        for num_done in range(21):
            progress(num_done / 2, num_done, self.num_total)
        if self.error is not None:
            raise self.error
        out.mkdir(parents=True, exist_ok=True)
        errors = pa.table({"error": ["5 tokens are too many", None, "7 tokens are too many"]})
        pq.write_table(errors, out / "requests.parquet")
        warnings = (*loaded.warnings, *self.warnings)
        return SimpleNamespace(
            summary=self.summary, directory=out, picture=out / "run.png", warnings=warnings
        )


@pytest.fixture
def fake_api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeApi:
    fake = FakeApi()
    module = ModuleType("simserve.api")
    module.run_to_directory = fake.run_to_directory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "simserve.api", module)
    monkeypatch.setattr(simserve, "api", module, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return fake


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_run_prints_latencies_counts_and_where_the_files_are(fake_api: FakeApi) -> None:
    outcome = invoke("run", "c.yaml")
    assert outcome.exit_code == 0, outcome.output
    rows = [
        line.replace("│", " ").replace("┃", " ").split() for line in outcome.stdout.splitlines()
    ]
    assert ["mean", "p50", "p95", "p99"] in rows
    assert ["TTFT", "10.00", "11.00", "13.00", "14.00"] in rows
    assert ["ITL", "20.00", "21.00", "23.00", "24.00"] in rows
    assert ["TPOT", "30.00", "31.00", "33.00", "–"] in rows
    assert ["E2EL", "40.00", "41.00", "43.00", "44.00"] in rows
    assert ["requests", "1,900", "completed,", "3", "rejected"] in rows
    assert ["output", "throughput", "1,234.50", "tokens/s"] in rows
    assert ["2", "rejected,", "such", "as:", "5", "tokens", "are", "too", "many"] in rows
    assert ["cached", "prompt", "tokens", "120", "of", "600", "(20.0", "%)"] in rows
    assert ["prefix_cache_hits", "480", "of", "1,000", "prefix_cache_queries"] in [
        row[:5] for row in rows
    ]
    assert ["preemptions", "7"] in rows
    assert ["decisions", "vllm", "0.11.0"] in rows
    assert ["timing", "roofline"] in rows
    assert "goodput" not in outcome.stdout
    assert "run directory: runs/c\n" in outcome.stdout
    assert "picture:       runs/c/run.png\n" in outcome.stdout


def test_a_run_without_latencies_says_so(fake_api: FakeApi) -> None:
    fake_api.summary["completed"] = 0
    assert "No request completed: there are no latencies." in invoke("run", "c.yaml").stdout


def test_no_hits_are_explained(fake_api: FakeApi) -> None:
    fake_api.summary |= {"prefix_cache_hits": 0, "prefix_cache_note": "No hits: no prompt is long."}
    assert "No hits: no prompt is long." in invoke("run", "c.yaml").stdout
    fake_api.summary |= {"prefix_cache_hits": None, "prefix_cache_note": None}
    assert "prefix caching off" in invoke("run", "c.yaml").stdout


def test_accepted_drafts_are_told(fake_api: FakeApi) -> None:
    assert "draft" not in invoke("run", "c.yaml").stdout
    counts = {"num_draft_tokens": 1500, "num_accepted_tokens": 600, "draft_acceptance_rate": 0.4}
    fake_api.summary |= {f"spec_decode_{key}": value for key, value in counts.items()}
    assert "600 of 1,500 (40.0 %)" in invoke("run", "c.yaml").stdout


def test_means_over_repetitions_are_called_so(fake_api: FakeApi) -> None:
    assert "repetitions" not in invoke("run", "c.yaml").stdout
    fake_api.summary |= {"num_repetitions": 3, "num_steps": 4321.0, "num_preemptions": 7.5}
    lines = [line.split("│")[1:3] for line in invoke("run", "c.yaml").stdout.splitlines()[8:-3]]
    facts = {name.strip(): value.strip() for name, value in filter(None, lines)}
    assert facts["repetitions"] == "3: all numbers are means over them"
    assert (facts["steps"], facts["preemptions"]) == ("4,321", "7.50")


def test_options_are_overrides(fake_api: FakeApi) -> None:
    outcome = invoke(
        "run", "c.yaml", "-o", "scheduler.max_num_seqs=64", "-o", "seed=3", "--seed", "5",
        "--percentile-metrics", "ttft, queue_time", "--metric-percentiles", "90,99.9",
        "--goodput", "ttft:500, tpot:50",
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    config = fake_api.loaded.config
    assert config.scheduler.max_num_seqs == 64
    assert config.seed == 5
    assert config.metrics.percentile_metrics == ("ttft", "queue_time")
    assert config.metrics.percentiles == (90, 99.9)
    assert config.metrics.goodput.ttft == 500
    rows = [
        line.replace("│", " ").replace("┃", " ").split() for line in outcome.stdout.splitlines()
    ]
    assert ["mean", "p90", "p99.9"] in rows
    assert ["queue", "time", "50.00", "52.00", "55.00"] in rows
    assert "E2EL" not in outcome.stdout


@pytest.mark.parametrize("goodput", ["ttft", "ttft:", ":5"])
def test_goodput_is_metric_and_bound(fake_api: FakeApi, goodput: str) -> None:
    outcome = invoke("run", "c.yaml", "--goodput", goodput)
    assert outcome.exit_code == 2
    assert "METRIC:MILLISECONDS" in outcome.stderr


def test_a_wrong_bound_names_what_was_given(fake_api: FakeApi) -> None:
    outcome = invoke("run", "c.yaml", "--goodput", "ttf:500")
    assert outcome.exit_code == 2
    assert "metrics.goodput.ttf: unknown key (did you mean 'ttft'?)" in outcome.stderr


def test_progress_goes_to_standard_error_in_tenths(fake_api: FakeApi) -> None:
    outcome = invoke("run", "c.yaml")
    lines = outcome.stderr.splitlines()
    assert len(lines) == 11
    assert lines[0] == "0.5 s simulated, 1 of 20 requests"
    assert lines[1] == "1.0 s simulated, 2 of 20 requests"
    assert lines[-1] == "10.0 s simulated, 20 of 20 requests"


def test_progress_without_a_total(fake_api: FakeApi) -> None:
    fake_api.num_total = None
    assert invoke("run", "c.yaml").stderr == "0.5 s simulated, 1 request\n"


def test_quiet_prints_nothing(fake_api: FakeApi) -> None:
    outcome = invoke("run", "c.yaml", "--quiet", "-o", "scheduler.enable_chunked_prefill=false")
    assert outcome.exit_code == 0
    assert outcome.output == ""


def test_warnings_are_printed(fake_api: FakeApi) -> None:
    fake_api.warnings = ("the model was not measured",)
    outcome = invoke("run", "c.yaml", "-o", "scheduler.enable_chunked_prefill=false")
    assert outcome.stderr.count("warning: scheduler.enable_chunked_prefill: vLLM v0.11.0 for") == 1
    assert outcome.stderr.endswith("warning: the model was not measured\n")


def test_nothing_is_overwritten(fake_api: FakeApi, tmp_path: Path) -> None:
    for expected in ("c", "c-2", "c-3"):
        invoke("run", "c.yaml")
        assert fake_api.out == Path("runs") / expected
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    assert invoke("run", "c.yaml", "--out", "empty").exit_code == 0
    outcome = invoke("run", "c.yaml", "--out", "full")
    assert outcome.exit_code == 2
    assert outcome.stderr == "full: exists already; name a new or empty folder for --out\n"
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("other")
    assert invoke("run", "c.yaml", "--out", "link").exit_code == 0
    assert fake_api.out == tmp_path / "other"


def test_output_that_cannot_be_written_is_no_traceback(
    fake_api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("simserve.cli.table.print_run", full)
    outcome = invoke("run", "c.yaml")
    assert outcome.exit_code == 2
    assert outcome.stderr.endswith("cannot read or write: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_that_cannot_be_written_is_no_traceback(option: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "simserve", option]
        outcome = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert outcome.stderr == "cannot read or write: [Errno 28] No space left on device\n"
    assert outcome.returncode == 2


def test_a_wrong_configuration_ends_with_2(fake_api: FakeApi, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG + "sede: 1\nmax_num_seqs: 2\n")
    outcome = invoke("run", "c.yaml")
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert outcome.stderr == (
        "c.yaml:3:1: sede: unknown key (did you mean 'seed'?)\n"
        "     3 | sede: 1\n"
        "       | ^\n"
        "c.yaml:4:1: max_num_seqs: unknown key: 'max_num_seqs' belongs under scheduler\n"
        "     4 | max_num_seqs: 2\n"
        "       | ^\n"
    )
    assert fake_api.loaded is None


def test_a_stalled_engine_ends_with_3(fake_api: FakeApi) -> None:
    fake_api.error = StalledError("request 1 waits for 5 blocks")
    outcome = invoke("run", "c.yaml")
    assert outcome.exit_code == 3
    assert outcome.stderr.endswith("request 1 waits for 5 blocks\n")


def test_an_interrupted_run_ends_with_130(fake_api: FakeApi) -> None:
    fake_api.summary["status"] = "interrupted"
    outcome = invoke("run", "c.yaml")
    assert outcome.exit_code == 130
    assert "run directory: runs/c\n" in outcome.stdout
    assert outcome.stderr.endswith("interrupted: runs/c has what ran until then\n")
    fake_api.error = KeyboardInterrupt()
    assert invoke("run", "c.yaml").exit_code == 130


def test_a_run_that_rejected_all_ends_with_1(fake_api: FakeApi) -> None:
    fake_api.summary |= {"completed": 0, "rejected": 3, "num_prompts": 3}
    for options in ((), ("--quiet",)):
        outcome = invoke("run", "c.yaml", "--out", "x" + "".join(options), *options)
        assert outcome.exit_code == 1
        told = f"no request ran: all 3 were rejected; {fake_api.out}/requests.parquet says why\n"
        assert outcome.stderr.endswith(told)
    fake_api.summary["num_prompts"] = 4  # one was aborted
    assert invoke("run", "c.yaml").exit_code == 0


def test_help_says_whose_itl_is_which() -> None:
    text = " ".join(invoke("run", "--help").output.split())
    assert 'What NVIDIA (AIPerf) and GuideLLM print as "inter-token latency" is TPOT here.' in text


def test_a_misspelt_command_is_suggested() -> None:
    outcome = invoke("rum")
    assert outcome.exit_code == 2
    assert "Did you mean 'run'?" in outcome.stderr


def test_a_choice_that_is_none_is_said_in_plain_words() -> None:
    outcome = invoke("explain", "run", "--slowest", "itl")
    assert outcome.exit_code == 2
    said = "Invalid value for '--slowest': 'itl' is not one of 'ttft', 'e2el'."
    assert outcome.stderr.splitlines()[-1] == f"Error: {said}"


def test_the_package_runs_as_the_script_does() -> None:
    said = [
        subprocess.run([sys.executable, *code, "rum"], capture_output=True, text=True)
        for code in (("-m", "simserve"), ("-c", "from simserve.cli.entry import main; main()"))
    ]
    assert said[0].returncode == said[1].returncode == 2
    assert said[0].stderr == said[1].stderr
    assert "Usage: simserve [OPTIONS]" in said[0].stderr


def test_version() -> None:
    assert invoke("--version").output == f"simserve {simserve.__version__}\n"


def test_help_lists_all_commands_and_imports_none() -> None:
    code = (
        "import sys\n"
        "from simserve.cli.main import main\n"
        "sys.argv = ['simserve', '--help']\n"
        "try:\n    main()\n"
        "finally:\n    print('LOADED', *sys.modules)\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    text, _, loaded = outcome.stdout.partition("LOADED ")
    for name, (target, summary) in COMMANDS.items():
        assert f"  {name} " in text
        assert summary in text
        assert target.partition(":")[0] not in loaded.split()
    heavy = {
        "numpy",
        "pandas",
        "matplotlib",
        "torch",
        "pyarrow",
        "simpy",
        "pydantic",
        "yaml",
        "rich",
    }
    assert not heavy & set(loaded.split())


def test_ctrl_c_has_no_traceback_while_the_command_line_is_imported() -> None:
    code = """
import os, signal, sys

class CtrlC:
    def find_spec(name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC)
from simserve.cli.entry import main
main()
"""
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    outcome = invoke(name, "--help")
    assert outcome.exit_code == 0, outcome.output
    assert f" {name} " in outcome.output.splitlines()[0]


def test_env_names_versions() -> None:
    facts = json.loads(invoke("env", "--json").stdout)
    assert facts["simserve"] == simserve.__version__
    assert facts["packages"]["simpy"]
    assert set(facts) == {"simserve", "commit", "python", "platform", "gpu", "packages"}
    assert f"simserve: {simserve.__version__}\n" in invoke("env").stdout
