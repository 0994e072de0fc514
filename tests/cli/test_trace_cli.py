"""`simserve trace`: what each command prints, writes and ends with."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import simserve
from simserve.cli.trace import app
from simserve.cli.trace_generate import parse_length
from simserve.errors import ConfigError, SimserveError
from simserve.report import trace_plots
from simserve.types import TraceRequest
from simserve.workload.lengths import ConstantLength, LognormalLength, UniformLength, ZipfLength
from simserve.workload.public import public_names, public_trace
from simserve.workload.trace import open_trace

TRACES = Path(__file__).parents[2] / "traces"
NAMES = ["long_vs_short", "multi_turn", "shared_template", "unique_prefix", "single_document"]
PUBLIC = os.environ.get("SIMSERVE_TRACES")


def call(*arguments: str | Path) -> tuple[int, str]:
    """Exit status and standard output of `simserve trace ...`; errors of simserve are raised."""
    outcome = CliRunner(env={"COLUMNS": "120"}).invoke(app, list(map(str, arguments)))
    if isinstance(outcome.exception, Exception):
        raise outcome.exception
    return outcome.exit_code, outcome.stdout


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def mooncake(timestamp: int, input_length: int = 20, hash_ids: tuple[int, ...] = (1,)) -> object:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": 5,
        "hash_ids": hash_ids,
    }


def requests_of(path: Path) -> list[TraceRequest]:
    return list(open_trace(path).requests())


def documented_commands() -> list[list[str]]:
    lines = (TRACES / "README.md").read_text().splitlines()
    return [shlex.split(line) for line in lines if line.startswith("simserve trace generate ")]


# --- the shipped files


@pytest.mark.parametrize("command", documented_commands(), ids=lambda command: command[3])
def test_each_documented_command_gives_the_shipped_bytes(
    command: list[str], tmp_path: Path
) -> None:
    place = command.index("--out") + 1
    shipped = TRACES / Path(command[place]).name
    command[place] = str(tmp_path / "again.jsonl")
    status, _ = call(*command[2:])
    assert status == 0
    assert (tmp_path / "again.jsonl").read_bytes() == shipped.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_are_the_shipped_files(name: str, tmp_path: Path) -> None:
    call("generate", name, "--out", tmp_path / "again.jsonl")
    shipped = (TRACES / f"{name}.jsonl").read_bytes()
    assert (tmp_path / "again.jsonl").read_bytes() == shipped
    assert len(shipped) < 60_000


def test_every_shipped_file_has_its_command() -> None:
    assert sorted(command[3] for command in documented_commands()) == sorted(NAMES)
    assert sorted(path.stem for path in TRACES.glob("*.jsonl")) == sorted(NAMES)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("long_vs_short", "0.0 %"),
        ("multi_turn", "73.5 %"),
        ("shared_template", "85.6 %"),
        ("unique_prefix", "0.0 %"),
        ("single_document", "0.0 %"),
    ],
)
def test_inspect_tells_them_apart_by_what_can_be_reused(name: str, share: str) -> None:
    status, output = call("inspect", TRACES / f"{name}.jsonl")
    assert status == 0
    line = next(line for line in output.splitlines() if "prefix-hit bound" in line)
    assert line.split("│")[2].strip() == share


def test_long_vs_short_puts_the_long_one_where_asked(tmp_path: Path) -> None:
    for position, place in (("first", 0), ("middle", 2), ("last", 4)):
        out = tmp_path / f"{position}.jsonl"
        call("generate", "long_vs_short", "--out", out, "--num-short", "4", "--position", position)
        assert [r.class_ for r in requests_of(out)].index("long") == place


# --- inspect


def test_inspect_prints_the_figures_of_a_trace(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "t.jsonl", *(mooncake(t, 1 + t // 100) for t in (0, 500, 500, 10500))
    )
    status, output = call("inspect", path)
    assert status == 0
    assert "t.jsonl (mooncake)" in output
    figures = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in output.splitlines())
        if len(cells) == 4
    }
    assert figures["requests"] == "4"
    assert figures["span"] == "10.500 s"
    assert figures["rate"] == "0.286 requests/s"
    assert figures["arrivals equal to the one before"] == "1"
    prompt = next(line for line in output.splitlines() if line.startswith("│ prompt"))
    assert [cell.strip() for cell in prompt.split("│")[2:-1]] == ["29.8", "6", "76", "103", "106"]


def test_a_low_rate_is_not_none(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "slow.jsonl", *(mooncake(10**8 * t) for t in range(1200)))
    _, output = call("inspect", path)
    assert " 1e-05 requests/s " in output


@pytest.mark.parametrize("lengths", [(600, 700, 800), (20, 4000), (5, 5)])
def test_lengths_have_numbers_below_them(
    lengths: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no 1, 2 or 5 of a decade is among them."""
    drawn: list[Figure] = []
    monkeypatch.setattr(trace_plots, "png", lambda figure: drawn.append(figure) or b"")
    rows = [{"arrival_s": i, "prompt_len": n, "output_len": n} for i, n in enumerate(lengths)]
    call("inspect", write_rows(tmp_path / "t.jsonl", *rows), "--plot", tmp_path / "t.png")
    drawn[0].draw_without_rendering()
    for axes in drawn[0].axes[:2]:
        low, high = axes.get_xlim()
        assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 2
        assert low > min(lengths) / 2


def test_inspect_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    call("inspect", TRACES / "shared_template.jsonl", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_a_single_request_has_no_rate_but_a_picture(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "one.jsonl", mooncake(7))
    _, output = call("inspect", path, "--plot", tmp_path / "one.png")
    assert "rate" in output
    assert " - │" in output
    assert (tmp_path / "one.png").is_file()


@pytest.mark.skipif(PUBLIC is None, reason="SIMSERVE_TRACES names no folder of public traces")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Full repeats keep one token to compute, hence 37.3 and 65.0 for shares of 37.4 and 65.1.
        ("mooncake_conversation.jsonl", ["12031", "3.401", "3.03", "7.90", "37.3 %"]),
        ("mooncake_synthetic.jsonl", ["3993", "3.906", "1.01", "1.09", "65.0 %"]),
        ("azure2023_code.csv", ["8819", "2.566", "13.15", "13.19", "0.0 %"]),
    ],
)
def test_inspect_agrees_with_known_figures(name: str, expected: list[str]) -> None:
    _, output = call("inspect", Path(PUBLIC or "") / name)
    for figure in expected:
        assert figure in output


# --- validate


def test_validate_says_ok(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "good.jsonl", mooncake(0), mooncake(1))
    assert call("validate", path) == (0, f"ok: {path}: 2 requests, format mooncake\n")


def test_validate_names_every_kind_of_fault_and_exits_2(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "bad.jsonl", mooncake(0), mooncake(1, 0), mooncake(-1), mooncake(2, 0, ())
    )
    status, output = call("validate", path)
    assert status == 2
    assert f"bad: {path}: zero_prompt: 2 of 4 rows (2, 4)" in output
    assert f"bad: {path}: negative: 1 of 4 rows (3)" in output
    assert f"first: {path}:2: input_length: is 0" in output


@pytest.mark.parametrize("content", ["", "{}\n", '{"arrival_s": 0, "output_len": 0}\n', "\x00\xff"])
def test_hopeless_files_are_errors_that_name_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "hopeless.jsonl"
    path.write_text(content, encoding="latin-1")
    for command in ("validate", "inspect"):
        with pytest.raises(SimserveError, match=r"hopeless\.jsonl") as caught:
            call(command, path)
        assert caught.value.exit_code == 2


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SimserveError, match="nothing"):
        call("inspect", tmp_path / "nothing.jsonl")


# --- convert


def test_convert_keeps_the_requests(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = TRACES / "multi_turn.jsonl"
    status, output = call("convert", source, out)
    assert (status, output) == (0, f"62 requests written to {out}\n")
    assert requests_of(out) == requests_of(source)


def test_convert_transforms_and_counts(tmp_path: Path) -> None:
    rows = [mooncake(t, 20 if t else 600, (1,) if t else (0, 1)) for t in (0, 1000, 2000)]
    path = write_rows(tmp_path / "in.jsonl", *rows)
    out = tmp_path / "out.jsonl"
    _, output = call("convert", path, out, "--speedup", "2", "--max-isl", "100", "--max-osl", "3")
    assert "max_isl: 1 request\n" in output
    assert "max_osl: 2 requests" in output
    # The file's own clock starts with its first request.
    assert [(r.arrival_s, r.output_len) for r in requests_of(out)] == [(0.0, 3), (0.5, 3)]
    assert json.loads(out.read_text().splitlines()[0])["arrival_s"] == 0.5


def test_convert_takes_options_of_the_format(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", mooncake(0, 20, (1, 2)))
    out = tmp_path / "out.jsonl"
    with pytest.raises(SimserveError, match="block_size"):
        call("convert", path, out)
    call("convert", path, out, "-o", "block_size=16")
    assert requests_of(out)[0].prompt_len == 20


def test_convert_writes_nothing_if_nothing_is_left(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", mooncake(0))
    with pytest.raises(SimserveError, match="leave no request"):
        call("convert", path, tmp_path / "out.jsonl", "--max-isl", "1")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speedup", "0"], "speedup_ratio"),
        (["--end-s", "nan"], "end_s"),
        (["-o", "block_size"], "KEY=VALUE"),
        (["-o", "block_size=[1"], "YAML"),
        (["-o", "blocksize=1"], "did you mean 'block_size'"),
    ],
)
def test_bad_options_of_convert_are_named(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = write_rows(tmp_path / "in.jsonl", mooncake(0))
    with pytest.raises(SimserveError, match=message):
        call("convert", path, tmp_path / "out.jsonl", *arguments)


# --- generate


def test_lengths_are_numbers_or_distributions() -> None:
    assert parse_length("n", "128") == ConstantLength(value=128)
    assert parse_length("n", "uniform:min=1,max=9") == UniformLength(min=1, max=9)
    assert parse_length("n", "zipf:alpha=1,min=1,max=9") == ZipfLength(alpha=1, min=1, max=9)
    chat = parse_length("n", "lognormal:mean=1005,sigma=0.8,min=16,max=6000")
    assert chat == LognormalLength(mean=1005, sigma=0.8, min=16, max=6000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("many", "neither a number nor"),
        ("-3", "neither a number nor"),
        ("unifrom:min=1,max=2", "did you mean 'uniform'"),
        ("uniform:min=1", "max is missing"),
        ("uniform:min=1,max=2.5", "max must be a whole number"),
        ("uniform:min=3,max=2", "max must be at least min"),
        ("lognormal:mean=x,sigma=1", "mean must be a number"),
        ("lognormal:mu=1,sigma=1", "there is no 'mu'"),
        ("0", "value must be at least 1"),
    ],
)
def test_bad_lengths_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SimserveError, match=f"prompt_len: .*{message}"):
        call("generate", "unique_prefix", "--out", tmp_path / "x", "--prompt-len", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["long_vs_short", "--position", "second"], "position"),
        (["long_vs_short", "--gap-s", "-1"], "gap_s"),
        (["long_vs_short", "--num-short", "-1"], "num_short"),
        (["multi_turn", "--num-sessions", "0"], "num_sessions"),
        (["shared_template", "--rate", "0"], "rate"),
        (["shared_template", "--burstiness", "0"], "burstiness"),
        (["unique_prefix", "--header-len", "0"], "header_len"),
        (["single_document", "--num-requests", "0"], "num_requests"),
    ],
)
def test_bad_options_of_generate_are_named(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "x.jsonl"
    with pytest.raises(SimserveError, match=message):
        call("generate", *arguments, "--out", out)
    assert not out.exists()


def test_all_at_once_and_bursty_arrivals_can_be_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    call("generate", "single_document", "--out", out, "--rate", "inf")
    assert {r.arrival_s for r in requests_of(out)} == {0.0}
    call("generate", "single_document", "--out", out, "--burstiness", "0.5")
    assert len({r.arrival_s for r in requests_of(out)}) == 24


def test_a_trace_is_not_converted_onto_itself(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "a.jsonl", mooncake(0), mooncake(5))
    before = trace.read_bytes()
    with pytest.raises(SimserveError, match="is the trace that is read"):
        call("convert", trace, tmp_path / "." / "a.jsonl")
    assert trace.read_bytes() == before


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "a.jsonl", mooncake(0), mooncake(5))
    for place in (tmp_path, tmp_path / "nowhere" / "x.png"):
        with pytest.raises(SimserveError, match="cannot write the picture"):
            call("inspect", trace, "--plot", place)


# --- public traces


def test_the_list_says_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMSERVE_CACHE", str(tmp_path))
    monkeypatch.delenv("SIMSERVE_TRACES", raising=False)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "burstgpt.csv").write_text("")
    _, shown = call("list")
    assert "another" in shown
    monkeypatch.setattr("simserve.workload.public.PublicTrace.is_at", lambda *_: True)
    _, shown = call("list")
    assert "another" not in shown
    rows = [line for line in shown.splitlines() if line.startswith("│")]
    here = {row.split()[1] for row in rows if row.rstrip(" │").endswith("yes")}
    assert here == {"burstgpt"}
    assert {row.split()[1] for row in rows} >= set(public_names())
    for name in public_names():
        assert public_trace(name).url in shown
    assert f"fetched into {tmp_path / 'traces'}" in shown


def test_fetched_traces_are_named_with_whom_to_cite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMSERVE_CACHE", str(tmp_path))
    content = b"rows"
    trace = replace(public_trace("burstgpt"), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr("simserve.workload.public.public_trace", lambda name: trace)
    monkeypatch.setattr("simserve.workload.fetch.urlopen", lambda *_, **__: Answer(content))
    path = tmp_path / "traces" / "burstgpt.csv"
    status, shown = call("fetch", "burstgpt")
    assert (status, path.read_bytes()) == (0, content)
    assert f"{path}: fetched, SHA-256 as published" in shown
    assert trace.licence in shown
    assert trace.attribution in shown
    assert "workload: {trace: {name: burstgpt}}" in shown
    assert f"{path}: was there already" in call("fetch", "burstgpt")[1]


class Answer(io.BytesIO):
    """What a server sends."""

    status = 200
    length = None


def test_a_configuration_may_name_a_public_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model": "llama-3.1-8b", "workload": {"trace": {"name": "azure2023_conv"}}}
    monkeypatch.setenv("SIMSERVE_CACHE", str(tmp_path))
    monkeypatch.delenv("SIMSERVE_TRACES", raising=False)
    with pytest.raises(ConfigError, match=r"trace\.name: .* `simserve trace fetch azure2023_conv`"):
        simserve.run(config)
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n"
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "azure2023_conv.csv").write_text(rows)
    monkeypatch.setattr("simserve.workload.public.PublicTrace.is_at", lambda *_: True)
    assert simserve.run(config).summary_dict["total_input_tokens"] == 48
