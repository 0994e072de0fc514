"""`simserve conform`: a line a case, and exit status 1 as soon as one field differs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASE = GOLDEN / "g27_too_long_deadlock_cache.json.gz"


def conform(*paths: Path) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["conform", *map(str, paths)])
    return outcome.exit_code, outcome.output


def test_equal_cases_exit_with_0() -> None:
    status, output = conform(CASE, GOLDEN / "g16_cache_salt.json.gz")
    assert status == 0
    assert "g27_too_long_deadlock_cache: equal (136 steps)" in output
    assert "2 of 2 cases equal" in output


@pytest.mark.parametrize(
    ("table", "row", "key", "says"),
    [
        ("steps", 40, "fs", "DIFFERS at step 40, fs: expected 1234567, got"),
        ("requests", 3, "ttft", "DIFFERS at request 3, ttft: expected 1234567, got"),
        ("summary", None, "preemptions", "DIFFERS at summary, preemptions: expected 1234567"),
    ],
)
def test_a_difference_names_its_place_and_exits_with_1(
    tmp_path: Path, table: str, row: int | None, key: str, says: str
) -> None:
    case = json.loads(gzip.decompress(CASE.read_bytes()))
    (case[table] if row is None else case[table][row])[key] = 1234567
    altered = tmp_path / "altered.json.gz"
    altered.write_bytes(gzip.compress(json.dumps(case).encode()))
    status, output = conform(CASE, altered)
    assert status == 1
    assert says in output
    assert "1 of 2 cases equal" in output


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[1]")],
    ids=["empty", "no gzip", "no case", "a list"],  # a gzip header holds the time
)
def test_what_is_no_case_exits_with_2(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json.gz"
    path.write_bytes(content)
    status, output = conform(path)
    assert status == 2
    assert "broken.json.gz: not a" in output
