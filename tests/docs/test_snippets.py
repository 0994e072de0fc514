"""README.md and docs/: configurations load, commands and Python snippets run, links lead somewhere.

The snippets of a page run in order, in a folder that looks like the checkout and holds a finished
run of the quick start. A snippet whose first line is a comment with a file name is saved under that
name. A fragment of a configuration gets the keys that it lacks. Of shell snippets the lines that
begin with `simserve` run, without drawing pictures. What cannot run has a line
`<!-- not run: why -->` above it: it must parse all the same. What stands below `<!-- output -->` is
what the snippet above it prints, up to a last line `…`. With SIMSERVE_WRITE_OUTPUTS=1 it is written
into the page instead.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.config.loader import load_config
from simserve.config.scheduler import Scheduler
from simserve.config.sweep_loader import load_points, load_sweep
from simserve.metrics.rundir import read_run
from simserve.sweep import worker
from simserve.sweep.task import Failure, Task

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"```(\w*)")
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
OUTPUT = "<!-- output -->"
MORE = "…\n"
FILE_NAME = re.compile(r"# ([\w.-]+\.\w+)")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
NO_PICTURE = ("-o", "metrics.plot=false")
MODEL = "model: llama-3.1-8b\n"
WORKLOAD = """
workload:
  synthetic: {num_requests: 1, output_len: {kind: constant, value: 1}}
"""


class Here:
    """Makes the points of a sweep in this process, which has everything loaded already."""

    def run(
        self,
        tasks: Iterable[Task],
        folder: Path,
        timeout_s: float | None,
        started: Callable[[Task], object],
    ) -> Iterator[tuple[Task, Failure | None]]:
        for task in tasks:
            started(task)
            worker._make(task, folder)
            yield task, None

    def close(self) -> None: ...


class Snippet(NamedTuple):
    where: str
    language: str
    text: str
    runs: bool
    is_output: bool = False


def snippets(page: Path) -> Iterator[Snippet]:
    lines = page.read_text().splitlines()
    start, language = 0, ""
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence and not start:
            start, language = number + 1, fence[1]
        elif fence:
            above = lines[start - 2] if start > 1 else ""
            text = "".join(f"{line}\n" for line in lines[start:number])
            where, runs = f"{page.name}:{start}", not NOT_RUN.match(above)
            yield Snippet(where, language, text, runs, above == OUTPUT)
            start = 0


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run directory of the quick start."""
    out = tmp_path_factory.mktemp("runs") / "quickstart"
    config = str(ROOT / "configs" / "quickstart.yaml")
    few = ["-o", "workload.synthetic.num_requests=20"]
    call(["run", config, *few, *NO_PICTURE, "--out", str(out), "--quiet"])
    return out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run(
    page: Path, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("configs", "schema", "tests", "traces"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(quickstart, tmp_path / "runs" / "quickstart")
    monkeypatch.setattr("simserve.sweep.runner.ProcessBackend", lambda jobs: Here())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for snippet in snippets(page):
        if file := FILE_NAME.match(snippet.text):
            Path(file[1]).write_text(snippet.text)
        try:
            if snippet.is_output:
                check_output(snippet, printed, page)
            else:
                printed = check(snippet, names)
        except Exception as error:
            error.add_note(f"in the snippet at {snippet.where}")
            raise


def check_output(snippet: Snippet, printed: str, page: Path) -> None:
    lines = [f"{line.rstrip()}\n" for line in printed.splitlines()]
    end = MORE if snippet.text.endswith(MORE) else ""
    num_lines = snippet.text.count("\n") - 1 if end else len(lines)
    expected = "".join(lines[:num_lines]) + end
    if os.environ.get("SIMSERVE_WRITE_OUTPUTS"):
        old, new = (f"{OUTPUT}\n```text\n{text}```\n" for text in (snippet.text, expected))
        page.write_text(page.read_text().replace(old, new, 1))
    else:
        assert snippet.text == expected


def check(snippet: Snippet, names: dict[str, Any]) -> str:
    """Run a snippet; what it printed."""
    if snippet.language == "yaml":
        text = snippet.text
        text += "" if re.search("^model:", text, re.M) else MODEL
        text += "" if re.search("^workload:", text, re.M) else WORKLOAD
        path = Path("snippet.yaml")
        path.write_text(text)
        if re.search("^sweep:", text, re.M):
            load_points(load_sweep(path))
        else:
            load_config(path)
    elif snippet.language == "python":
        code = compile(snippet.text, snippet.where, "exec")
        if snippet.runs:
            with redirect_stdout(io.StringIO()) as printed:
                exec(code, names)
            return printed.getvalue()
    elif snippet.language in ("sh", "console"):
        return "".join(run_command(command, snippet.runs) for command in commands(snippet.text))
    elif snippet.language == "json":
        for line in [snippet.text] if snippet.text.startswith("{\n") else snippet.text.splitlines():
            json.loads(line)
    return ""


def run_command(command: list[str], runs: bool) -> str:
    if not runs:
        return call([*command, "--help"])
    return call([*command, *NO_PICTURE] if command[0] == "run" else command)


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of each `simserve` in a shell snippet."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words and words[0] == "simserve":
            yield words[1:]


def call(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"simserve {shlex.join(arguments)}\n{result.output}"
    return result.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    dead = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not dead


def test_every_column_is_described(quickstart: Path) -> None:
    page = (ROOT / "docs" / "run-directory.md").read_text()
    run = read_run(quickstart)
    for column in (*run.requests_table.column_names, *run.steps_table.column_names):
        name = "parts.*" if column.startswith("parts.") else column
        assert f"`{name}`" in page, column


def test_every_key_of_the_scheduler_is_described() -> None:
    page = (ROOT / "docs" / "scheduler.md").read_text()
    for key in Scheduler.model_fields:
        assert f"`{key}" in page, key


def test_a_snippet_that_does_not_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the snippets can fail, for each kind of them."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    bad = {"yaml": "sheduler: {}", "python": "1 / 0", "sh": "simserve rum", "json": "{"}
    for language, text in bad.items():
        page.write_text(f"```{language}\n{text}\n```\n")
        (snippet,) = snippets(page)
        with pytest.raises((Exception, SystemExit)):
            check(snippet, {})
    page.write_text("<!-- not run: it would divide by zero -->\n```python\n1 / 0\n```\n")
    (snippet,) = snippets(page)
    check(snippet, {})


def test_an_output_that_is_out_of_date_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{OUTPUT}\n```text\none\n…\n```\n")
    (snippet,) = snippets(page)
    check_output(snippet, "one \ntwo\n", page)
    with pytest.raises(AssertionError):
        check_output(snippet, "1\n2\n", page)
    page.write_text(f"{OUTPUT}\n```text\none\n```\n")
    (snippet,) = snippets(page)
    with pytest.raises(AssertionError):
        check_output(snippet, "one\ntwo\n", page)
