"""The rules of the house that no linter knows: sizes, and words that do not belong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

ROOT = Path(__file__).parents[1]
TEXT = {
    ".cfg",
    ".csv",
    ".html",
    ".ipynb",
    ".json",
    ".jsonl",
    ".md",
    ".py",
    ".toml",
    ".yaml",
    ".yml",
}
FOLDERS = [
    "simserve",
    "kernels",
    "tests",
    "configs",
    "traces",
    "schema",
    "notebooks",
    "benchmarks",
    "docs",
]
# Spelled apart, so that this file does not hold them.
ONE_MACHINE = re.compile(
    "|".join(["/ho" + r"me/\w", "/Use" + r"rs/\w", "/ro" + "ot/", "/wo" + "rk/"])
)
NEIGHBOUR = "../sha" + "red"


def sources() -> list[Path]:
    """Python files of both packages."""
    return sorted([*(ROOT / "simserve").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])


def text_files() -> Iterator[Path]:
    """Files of the project that people read."""
    yield from (path for path in ROOT.iterdir() if path.suffix in TEXT or path.name == "Makefile")
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in TEXT)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_modules_and_functions_can_be_read_in_one_sitting(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_MODULE_LINES
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    sizes = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, functions)
    }
    long = {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES}
    assert not long


def test_files_do_not_know_where_they_lie() -> None:
    """Paths of one machine, and folders beside the checkout (which only CI may look for)."""
    bad = []
    for path in text_files():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if ONE_MACHINE.search(line) or NEIGHBOUR in line:
                bad.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert not bad
