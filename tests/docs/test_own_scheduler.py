"""The tutorial on a scheduler of one's own: its file is short, runs as printed, and is checked."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import simserve
from simserve.cli.main import app
from simserve.errors import ConfigError, PluginError
from simserve.registry import check_protocol, resolve
from tests.sched.harness import request, simulate

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own-scheduler.md"
NAME = "my_sched:MyScheduler"


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files, as the current one; only the registry finds `my_sched`."""
    for text in [*snippets("python"), *snippets("yaml")]:
        if name := re.match(r"# (\S+)\n", text):
            (tmp_path / name[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    sys.modules.pop("my_sched", None)
    yield tmp_path
    sys.modules.pop("my_sched", None)


def test_it_is_one_file_of_less_than_60_lines(folder: Path) -> None:
    assert len((folder / "my_sched.py").read_text().splitlines()) < 60


@pytest.mark.usefixtures("folder")
def test_steps() -> None:
    """16 usable blocks of 4 tokens; half of the 17 must stay free, unless nothing runs."""
    run = simulate(
        NAME,
        [request("a", 20, 3), request("b", 12, 2), request("c", 8, 1)],
        num_gpu_blocks=17,
        max_num_batched_tokens=24,
        options={"watermark": 0.5},
    )
    assert run.steps == [
        (["a"], [20]),  # 11 blocks are left, 8 after b: too few
        (["a"], [1]),  # 10 are left
        (["a"], [1]),  # a has its 3 tokens
        (["b", "c"], [12, 8]),  # nothing runs: b is let in; c leaves 11 free
        (["b"], [1]),
    ]
    assert run.status == "completed"


@pytest.mark.usefixtures("folder")
def test_numbers_on_the_page() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(snippets("python")[1], {})
    assert said.getvalue() == snippets("text")[0]


@pytest.mark.usefixtures("folder")
def test_without_watermark_it_decides_as_vllm() -> None:
    summaries = []
    for kind, options in ((NAME, {"watermark": 0}), ("vllm", {})):
        overrides = {"scheduler.kind": kind, "scheduler.options": options}
        summaries.append(simserve.run("own.yaml", overrides).summary_dict)
    for key in ("num_steps", "num_preemptions", "duration", "mean_ttft_ms", "p99_itl_ms"):
        assert summaries[0][key] == summaries[1][key]


def test_a_missing_method_is_named_before_anything_runs(folder: Path) -> None:
    text = (folder / "my_sched.py").read_text().replace("def schedule(", "def shedule(")
    (folder / "my_sched.py").write_text(text)
    with pytest.raises(PluginError, match="schedule") as raised:
        check_protocol(resolve("schedulers", NAME), "schedulers")
    result = CliRunner().invoke(app, ["run", "own.yaml", "--out", "out"])
    assert result.exit_code == 2
    assert str(raised.value) in result.stderr
    assert result.stderr.strip() == snippets("text")[1].strip()
    assert not (folder / "out").exists()


@pytest.mark.usefixtures("folder")
def test_wrong_options_are_errors() -> None:
    for options in ({"watermark": 1}, {"watermark": -0.1}, {"watermarks": 0.1}):
        with pytest.raises(ConfigError, match="there is only watermark"):
            simserve.run("own.yaml", {"scheduler.options": options})


@pytest.mark.usefixtures("folder")
def test_a_wrong_option_is_put_down_to_who_set_it() -> None:
    for name in ("watermark=2", "watermarks=0.1"):
        override = f"scheduler.options.{name}"
        with pytest.raises(ConfigError, match=rf"^-o {override}: scheduler\.options: there is"):
            simserve.run("own.yaml", [override])
    path = Path("own.yaml")
    path.write_text(path.read_text().replace("watermark: 0.1", "watermark: 2"))
    with pytest.raises(ConfigError, match=r"^own\.yaml:\d+:3: scheduler\.options: there is"):
        simserve.run("own.yaml", ["scheduler.max_num_seqs=8"])


@pytest.mark.usefixtures("folder")
def test_modules_and_classes_that_are_not_there() -> None:
    with pytest.raises(PluginError, match="cannot load 'my_sched:Other'"):
        resolve("schedulers", "my_sched:Other")
    with pytest.raises(PluginError, match="cannot load 'no_sched:MyScheduler'"):
        resolve("schedulers", "no_sched:MyScheduler")


def test_a_file_that_python_cannot_read_is_one_error(folder: Path) -> None:
    (folder / "half_sched.py").write_text("class MyScheduler:\n    def schedule(self\n")
    with pytest.raises(PluginError, match=r"cannot load 'half_sched:MyScheduler': .*half_sched.py"):
        resolve("schedulers", "half_sched:MyScheduler")
